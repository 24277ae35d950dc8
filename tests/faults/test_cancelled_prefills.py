"""Ten long prompts are cancelled while they are computed, and the next request does not wait for them."""

import os
from pathlib import Path

import pytest
from support.cluster.fleet import FleetPlan, fleet
from support.engines.checkpoints import DEMO
from support.faults.cancelled_prefills import cancel_prefills
from support.servers.etcd import EtcdServer

FULL = os.environ.get("BATON_FAULTS") == "full"
ENGINES = {
    "simulated": "engine={kind: simulated, name: demo, num_blocks: 8192, block_bytes: 1024, "
    "prefill_tokens_per_second: 1000, prefill_chunk_tokens: 128}",
    "pytorch": f"engine={{kind: pytorch, model: {DEMO}, name: demo, threads: 1, kv_cache_bytes: 64MiB}}",
}


@pytest.mark.skipif(not FULL, reason="another test does it in one process")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ENGINES)
async def test_cancelled_prefills_do_not_hold_up_the_next_request(
    engine: str, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    worker = (ENGINES[engine], "drain_seconds=1")
    plan = FleetPlan(f"cancelled-{engine}", shared_etcd.endpoint, worker, ("drain_seconds=1",), prefill=1, decode=1)
    async with fleet(plan, tmp_path) as running:
        await cancel_prefills(running, engine)
