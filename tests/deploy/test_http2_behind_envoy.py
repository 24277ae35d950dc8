"""Many clients on the one connection that Envoy has to a router on our own HTTP/2."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio
from grpc import StatusCode, aio
from support.clients.generation import generate_all, greedy_text
from support.clients.scraping import since
from support.cluster.in_process import PATIENT, simulated
from support.eventually import eventually
from support.lifetimes import in_one_task
from support.servers.envoy import running_envoy

from baton.inference.v1 import model_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from discovery.memory import MemoryRegistry
from router.server import host_router
from rpc.channels import open_channel
from services.server import host_worker

in_shared_loop = pytest.mark.asyncio(loop_scope="module")

# A separate connection to the same address, and not one that another channel has.
OWN = {"grpc.use_local_subchannel_pool": 1}
EXCEEDED = "baton_http2_budget_exceeded_total"
ROUTER = PATIENT.model_copy(update={"server": "http2"})
WORKER = simulated("w1", "prefill", "decode", decode_step_seconds=0.005)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Of an Envoy before one router."""

    @asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        registry = MemoryRegistry("test")
        async with host_worker(WORKER, registry), host_router(ROUTER, registry) as router:
            await eventually(lambda: any(not worker.problem for worker in router.cluster.workers))
            async with running_envoy(tmp_path_factory.mktemp("envoy"), [router.address]) as envoy:
                yield envoy.address

    async with in_one_task(serve()) as found:
        yield found


async def begin_and_cancel(channel: aio.Channel, times: int) -> None:
    """Every other one as soon as it is sent, and the rest once it runs."""
    stub = InferenceServiceStub(channel)
    for number in range(times):
        call = stub.Generate(greedy_text(f"number {number}", 4000))
        if number % 2:
            assert await call.read() is not aio.EOF
        else:
            await call.wait_for_connection()
        call.cancel()
        assert await call.code() is StatusCode.CANCELLED


@in_shared_loop
async def test_cancels_of_many_clients_leave_the_other_streams_of_envoys_connection_alone(address: str) -> None:
    counted = since(EXCEEDED)
    async with AsyncExitStack() as stack:
        # Each has a connection of its own, on which Envoy itself allows 500 early cancels.
        clients = [await stack.enter_async_context(open_channel(address, replaced_options=OWN)) for _ in range(9)]
        stub = InferenceServiceStub(clients.pop())
        others = asyncio.ensure_future(generate_all(stub, [greedy_text("other", 1000)] * 3, at_once=3))
        await asyncio.gather(*(begin_and_cancel(each, 100) for each in clients * 4))
        assert [len(each.ids) for each in await others] == [1000] * 3
    assert counted.grown == 0


@in_shared_loop
async def test_more_streams_at_once_than_a_connection_takes_are_served(address: str) -> None:
    counted = since(EXCEEDED)
    async with open_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        answers = await generate_all(stub, [greedy_text("at once", 4)] * 1000, at_once=1000)
    assert {len(each.ids) for each in answers} == {4}
    assert counted.grown == 0


async def list_models(address: str, headers: int, header_bytes: int) -> None:
    """With so many more headers, each of so many bytes with its name."""
    metadata = [(f"x-{number:02}", "v" * (header_bytes - 4)) for number in range(headers)]
    async with open_channel(address) as channel:
        await InferenceServiceStub(channel).ListModels(model_pb2.ListModelsRequest(), metadata=metadata, timeout=60)


@in_shared_loop
async def test_envoy_refuses_headers_that_a_router_would_refuse_too(address: str) -> None:
    """Each refusal takes from what the router allows to all clients of the connection."""
    counted = since(EXCEEDED)
    for headers, header_bytes in ((20, 620), (6, 2100), (80, 155)):
        with pytest.raises(aio.AioRpcError) as caught:
            await list_models(address, headers, header_bytes)
        assert caught.value.code() is not StatusCode.DEADLINE_EXCEEDED
    with pytest.raises(aio.AioRpcError):
        await list_models(address, 110, 10)
    assert counted.grown == 0


@in_shared_loop
async def test_a_router_takes_all_headers_that_envoy_takes(address: str) -> None:
    counted = since(EXCEEDED)
    for headers, header_bytes in ((84, 138), (11, 1060), (90, 10)):
        await list_models(address, headers, header_bytes)
    assert counted.grown == 0
