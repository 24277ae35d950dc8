"""Every role, at every step, killed, paused, cut off, cancelled: `make faults` runs all of it, a test run a sample."""

import os
from pathlib import Path

import pytest
from support.cluster.fleet import FleetPlan, fleet
from support.faults.cells import all_cells, sample
from support.faults.table import table
from support.faults.trials import Shape, Trials
from support.servers.etcd import EtcdServer
from support.transports.nixl import NIXL

FULL = os.environ.get("BATON_FAULTS") == "full"
LEASE_SECONDS = 1.0
SIMULATED = (
    "engine={kind: simulated, name: demo, allow_faults: true, num_blocks: 4096, block_bytes: 1024, "
    "prefill_tokens_per_second: 8000, prefill_chunk_tokens: 256, decode_step_seconds: 0.02, image_tokens: 16}",
    "encode.inline_bytes=0",
    f"handoff.lease_seconds={LEASE_SECONDS}",
    "drain_seconds=2",
)
ROUTER = (
    "allow_faults=true",
    "probe={interval_seconds: 0.3, timeout_seconds: 0.7, hung_seconds: 1.5}",
    "routing.session_slack=1000",
    # Of the long prompts, which are computed in several steps: their handoffs begin meanwhile.
    "routing.early_handoff_tokens=512",
    "retry.budget_floor=1000",
    "embeddings.max_bytes=0",
    "drain_seconds=2",
)


@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("transport", ["shm", NIXL, "tcp"] if FULL else ["shm", "tcp"])
async def test_whatever_happens_nothing_is_lost_and_nothing_leaks(
    transport: str, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    plan = FleetPlan(
        f"faults-{transport}", shared_etcd.endpoint, (*SIMULATED, f"transports=[{transport}]"), ROUTER, encode=2
    )
    cells = all_cells() if FULL else sample(transport)
    reports = []
    async with fleet(plan, tmp_path) as running:
        trials = Trials(running, LEASE_SECONDS, Shape())
        await trials.learn(images=True)
        for cell in cells:
            reports.append(await trials.run(cell, 9 if FULL else 4))
    print("\n" + table(f"faults, simulated engine, {transport}", reports))
    assert [fault for report in reports for fault in report.faults] == []
