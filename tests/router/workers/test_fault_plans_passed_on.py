"""A client's fault plan reaches the workers if the router allows it; the outcomes of such requests."""

import asyncio

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import FAST_ROUTER, bench, simulated
from support.eventually import eventually

from baton.inference.v1 import generate_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

ALLOWING = FAST_ROUTER.model_copy(update={"allow_faults": True})
LONG = generate_pb2.GenerateRequest(prompt="hello", sampling={"seed": 3}, stopping={"max_tokens": 20})


FOUR = [
    simulated(name, role, allow_faults=True)
    for name, role in (("p1", "prefill"), ("p2", "prefill"), ("d1", "decode"), ("d2", "decode"))
]


async def finished(stub: InferenceServiceStub, plan: str) -> tuple[list[int], generate_pb2.Finished]:
    messages = [message async for message in stub.Generate(LONG, timeout=60, metadata=(("x-baton-fault", plan),))]
    return [token for message in messages for token in message.token.token_ids], messages[-1].finished


async def test_a_router_that_does_not_allow_it_refuses_a_plan() -> None:
    async with bench(*FOUR) as running:
        with pytest.raises(aio.AioRpcError, match="allow_faults") as caught:
            await finished(running.stub, "drop@decode:7")
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "plan", ["drop@queue", "drop@prefill", "drop@held", "corrupt@pull", "drop@pull", "drop@confirm", "drop@decode:7"]
)
async def test_a_fault_of_the_first_attempt_costs_a_migration_and_no_token(plan: str) -> None:
    async with bench(*FOUR, router=ALLOWING) as running:
        undisturbed, _ = await finished(running.stub, "")
        ids, end = await finished(running.stub, plan)
        assert ids == undisturbed
        assert end.migrations == 1


async def test_a_plan_that_cannot_be_is_the_clients_fault() -> None:
    async with bench(*FOUR, router=ALLOWING) as running:
        with pytest.raises(aio.AioRpcError, match="expected one of crash") as caught:
            await finished(running.stub, "explode@decode")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_faults_at_every_attempt_end_in_a_typed_error() -> None:
    async with bench(*FOUR, router=ALLOWING) as running:
        with pytest.raises(aio.AioRpcError, match="as planned by x-baton-fault") as caught:
            await finished(running.stub, "drop@queue;role=decode;attempt=any")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_lost_handoff_without_a_worker_to_go_on_is_unavailable() -> None:
    # A call that fails keeps its worker out of rotation until the next probe.
    probe = ALLOWING.probe.model_copy(update={"interval_seconds": 60.0})
    one = [simulated(name, role, allow_faults=True) for name, role in (("p1", "prefill"), ("d1", "decode"))]
    async with bench(*one, router=ALLOWING.model_copy(update={"probe": probe})) as running:
        pulling = asyncio.create_task(finished(running.stub, "delay=2@pull,drop@pull"))
        await eventually(lambda: running.workers["d1"].engines.load().blocks_used > 0)
        with pytest.raises(aio.AioRpcError):
            await finished(running.stub, "drop@queue;role=decode;attempt=any")
        with pytest.raises(aio.AioRpcError, match=r"no decode worker became ready.*lost at pull") as caught:
            await pulling
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
