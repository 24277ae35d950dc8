"""A client that leaves while its answer's KV is on the way: the decode that it left takes the KV over."""

from typing import Any

import pytest
from support.clients.resuming import Received
from support.clients.scraping import sample
from support.cluster.in_process import FAST_ROUTER, bench
from support.eventually import eventually
from support.images.simulated_workers import about, multimodal

from baton.inference.v1 import generate_pb2
from services.config import WorkerConfig

ALLOWING = FAST_ROUTER.model_copy(update={"allow_faults": True})


def worker(worker_id: str, role: str) -> WorkerConfig:
    return multimodal(worker_id, role, allow_faults=True)


async def read(call: Any, received: Received, until: int = 10**9) -> None:
    async for message in call:
        received.add(message)
        if received.tokens >= until:
            call.cancel()
            break


@pytest.mark.parametrize("point", ["reserve", "pull", "confirm"])
async def test_an_answer_left_before_its_kv_is_confirmed_goes_on_without_its_request(point: str) -> None:
    workers = [worker("e1", "encode"), worker("p1", "prefill"), worker("d1", "decode")]
    async with bench(*workers, router=ALLOWING) as running:
        request = generate_pb2.GenerateRequest(**about(max_tokens=12))
        request.response.keep.seconds = 5
        expected = Received(request)
        await read(running.stub.Generate(request), expected)
        received = Received(request)
        plan = (("x-baton-fault", f"delay=0.5@{point}"),)
        await read(running.stub.Generate(request, metadata=plan), received, until=1)
        await eventually(lambda: sample("baton_router_running_requests") == 0)
        # Without its request an image cannot be computed again.
        await read(running.stub.ResumeGeneration(received.resume(with_copy=False), timeout=10.0), received)
        assert received.whole == expected.whole
        await eventually(lambda: not any(one.engines.load().blocks_used for one in running.workers.values()))


@pytest.mark.parametrize("point", ["reserve", "pull", "confirm"])
async def test_an_answer_cancelled_before_its_kv_is_confirmed_holds_no_kv(point: str) -> None:
    workers, expired = [worker("p1", "prefill"), worker("d1", "decode")], sample("baton_handoff_lease_expiries_total")
    async with bench(*workers, router=ALLOWING) as running:
        request = generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 12})
        request.response.keep.seconds = 5
        received = Received(request)
        plan = (("x-baton-fault", f"delay=0.5@{point}"),)
        await read(running.stub.Generate(request, metadata=plan), received, until=1)
        await running.stub.CancelGeneration(generate_pb2.CancelGenerationRequest(handle=received.resume().handle))
        await eventually(lambda: not any(one.engines.load().blocks_used for one in running.workers.values()))
        assert sample("baton_handoff_lease_expiries_total") == expired
