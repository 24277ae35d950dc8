"""Ten long prompts are cancelled while they are computed, and the next request does not wait for them."""

import asyncio
import os
import time
import uuid
from pathlib import Path

import pytest
from baton.inference.v1 import generate_pb2 as pb
from support.checkpoints import DEMO
from support.etcd_server import EtcdServer
from support.faults.outcomes import Outcome, follow
from support.fleet import Fleet, FleetPlan, fleet

from rpc.aio import timeout

FULL = os.environ.get("BATON_FAULTS") == "full"
CANCELLED = 10
ENGINES = {
    "simulated": "engine={kind: simulated, name: demo, num_blocks: 8192, block_bytes: 1024, "
    "prefill_tokens_per_second: 1000, prefill_chunk_tokens: 128}",
    "pytorch": f"engine={{kind: pytorch, model: {DEMO}, name: demo, threads: 1, kv_cache_bytes: 64MiB}}",
}


def request(tokens: int) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(request_id=uuid.uuid4().hex)
    asked.token_ids.ids.extend(position * 7 % 200 + 20 for position in range(tokens))
    asked.stopping.max_tokens = 2
    asked.stopping.ignore_eos = True
    asked.routing.cache_salt = uuid.uuid4().hex
    return asked


async def seconds_to_first_token(fleet: Fleet) -> float:
    started = time.monotonic()
    call = fleet.stub.Generate(request(16), timeout=60)
    async for message in call:
        if message.token.token_ids:
            break
    call.cancel()
    return time.monotonic() - started


@pytest.mark.skipif(not FULL, reason="another test does it in one process")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ENGINES)
async def test_cancelled_prefills_do_not_hold_up_the_next_request(
    engine: str, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    worker = (ENGINES[engine], "drain_seconds=1")
    plan = FleetPlan(f"cancelled-{engine}", shared_etcd.endpoint, worker, ("drain_seconds=1",), prefill=1, decode=1)
    async with fleet(plan, tmp_path) as running:
        await seconds_to_first_token(running)
        alone = await seconds_to_first_token(running)
        asked = [request(1900) for _ in range(CANCELLED)]
        tasks = [
            asyncio.create_task(follow(running.stub.Generate(one, timeout=60), Outcome(one.request_id)))
            for one in asked
        ]
        while (await running.load("prefill-0")).running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        after = await seconds_to_first_token(running)
        await asyncio.gather(*tasks, return_exceptions=True)
        print(
            f"\n{engine}: first token after {alone * 1000:.0f} ms alone, {after * 1000:.0f} ms after the cancelled ones"
        )
        assert after < alone + 1.0
        async with timeout(1.0):
            while await running.blocks_used():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
