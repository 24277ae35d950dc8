"""A worker whose registration is lost, and that is registered again while calls of before still run."""

import asyncio

import pytest
from support.cluster.in_process import Bench, bench, simulated
from support.eventually import eventually

from baton.inference.v1 import sampling_pb2

WORKER = simulated("w0", "prefill", "decode", decode_step_seconds=0.02)


def stopping(tokens: int) -> sampling_pb2.StoppingOptions:
    return sampling_pb2.StoppingOptions(max_tokens=tokens, ignore_eos=True)


def deregister(running: Bench) -> None:
    """Loses the only registration, as an etcd does whose lease ran out; `running.registry.publish` brings it back."""
    registrations = running.registry._registrations
    running.registry._registrations = []
    running.registry.publish()
    running.registry._registrations = registrations


# In the same turn of the event loop, before it was seen to leave, or after.
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 50])
async def test_a_worker_that_returns_while_its_calls_run_stays(turns: int) -> None:
    async with bench(WORKER) as running:
        answering = asyncio.create_task(running.generate(prompt="a", stopping=stopping(60)))
        await eventually(lambda: running.workers["w0"].engines.load().running > 0)
        deregister(running)
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == 50:
            await eventually(lambda: not running.cluster.workers)
        running.registry.publish()
        await running.ready(1)
        assert len((await answering).token_ids) == 60
        # The one that left has no calls any more, and is gone for good now.
        for _ in range(50):
            await asyncio.sleep(0.01)
            assert [worker.problem for worker in running.cluster.workers] == [""]
        assert (await running.generate(prompt="b", stopping=stopping(1))).token_ids
