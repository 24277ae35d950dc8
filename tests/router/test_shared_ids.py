"""Request ids chosen by different clients are independent, even if they are equal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import FAST_ROUTER, PREFILL, Bench, bench, eventually, simulated
from support.router.contexts import request_context

from baton.errors import RequestNotFound
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.context import RequestTable
from router.server import host_router
from rpc.auth.caller import Caller
from rpc.channels import open_channel

SLOW_DECODE = simulated("d1", "decode", decode_step_seconds=0.02)
SHARED = generate_pb2.GenerateRequest(prompt="hello", request_id="shared", stopping={"max_tokens": 60})

Stub = inference_service_pb2_grpc.InferenceServiceStub


@asynccontextmanager
async def another_router(running: Bench) -> AsyncIterator[Stub]:
    """In front of the same workers."""
    async with host_router(FAST_ROUTER, running.registry) as host, open_channel(host.address) as channel:
        count = len(running.workers)
        await eventually(lambda: sum(not one.problem for one in host.cluster.workers) == count)
        yield Stub(channel)


async def tokens_of(stub: Stub, request: generate_pb2.GenerateRequest, seconds: float) -> int:
    return sum([len(message.token.token_ids) async for message in stub.Generate(request, timeout=seconds)])


async def test_a_cancel_on_one_router_leaves_the_same_id_on_another_alone() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running, another_router(running) as other:
        mine = asyncio.create_task(tokens_of(running.stub, SHARED, 20))
        theirs = other.Generate(SHARED, timeout=60)
        await eventually(lambda: running.workers["d1"].engine.load().running == 2)
        await other.CancelGeneration(generate_pb2.CancelGenerationRequest(request_id="shared"), timeout=60)
        with pytest.raises(aio.AioRpcError) as failure:
            async for _ in theirs:
                pass
        assert failure.value.code() is grpc.StatusCode.CANCELLED
        assert await mine == 60


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_deadline_on_one_router_leaves_the_same_id_on_another_alone(stage: str) -> None:
    slow = simulated("p1", "prefill", prefill_base_seconds=0.6) if stage == "prefill" else PREFILL
    async with bench(slow, SLOW_DECODE) as running, another_router(running) as other:
        worker = running.workers["p1" if stage == "prefill" else "d1"]
        mine = asyncio.create_task(tokens_of(running.stub, SHARED, 20))
        await eventually(lambda: worker.engines.load().running == 1)
        with pytest.raises(aio.AioRpcError) as failure:
            await tokens_of(other, SHARED, 0.3)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await mine == 60


async def test_callers_may_use_the_same_id_and_cancel_their_own_only() -> None:
    table = RequestTable()
    alice, bob = Caller("alice", "client"), Caller("bob", "client")
    hers, his = request_context("shared", caller=alice), request_context("shared", caller=bob)
    table.add(hers)
    with pytest.raises(RequestNotFound):
        table.find("shared", bob)
    table.add(his)
    assert table.find("shared", bob) == [his]
    assert table.find("shared", Caller("root", "operator")) == [hers, his]
    table.remove(his)
    assert table.find("shared", alice) == [hers]
