"""A server's life: listening, reflection, and its drain."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.servers.scripted_router import NAME, scripted, service

from baton.calls import stream, unary
from baton.errors import BatonError, ConfigError, Unavailable
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel
from rpc.health import NOT_SERVING, SERVING, Health
from rpc.server import ServerOptions, serve
from runtime.aio import timeout

GRPCIO = ServerOptions(kind="grpcio")


async def get_model(request: object, context: object) -> model_pb2.GetModelResponse:
    return model_pb2.GetModelResponse()


async def test_a_server_on_port_0_says_where_it_listens() -> None:
    async with scripted(GetModel=get_model) as peer:
        assert peer.server.port > 0
        assert peer.server.address == f"127.0.0.1:{peer.server.port}"


async def test_a_taken_port_is_a_config_error_that_names_it() -> None:
    async with scripted() as peer:
        with pytest.raises(ConfigError, match=peer.server.address):
            async with serve(peer.server.address, [], health=Health()):
                pass


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:http", "", "127.0.0.1:99999", "no.such.host.invalid:0"])
async def test_an_address_that_is_none_is_a_config_error_that_names_it(listen: str) -> None:
    with pytest.raises(ConfigError, match=repr(listen)):
        async with serve(listen, [], health=Health()):
            pass


async def test_reflection_lists_the_services() -> None:
    async with scripted() as peer:
        reflection = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {found.name async for answer in call for found in answer.list_services_response.service}
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_reflection_describes_a_service() -> None:
    async with scripted() as peer:
        reflection = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME)
        (answer,) = [answer async for answer in reflection.ServerReflectionInfo(iter([request]))]
    assert answer.file_descriptor_response.file_descriptor_proto


@dataclass(frozen=True, slots=True)
class Left:
    """A server that is being left while a stream runs on it."""

    leaving: asyncio.Task[None]
    responses: AsyncGenerator[pb.GenerateResponse, None]
    channel: aio.Channel


@asynccontextmanager
async def left(drain_seconds: float, generate: Callable[..., Any], **more: float) -> AsyncGenerator[Left, None]:
    """Starts to leave a server once `generate` has written one message, and goes on once watchers know of it."""
    health = Health()
    methods = {"Generate": generate, "GetModel": get_model}
    serving = serve("127.0.0.1:0", [service(methods)], health=health, drain_seconds=drain_seconds, **more)
    server = await serving.__aenter__()
    health.set("", True)
    async with open_channel(server.address) as channel:
        watch = stream(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(watch)).status == SERVING
        async with aclosing(stream(InferenceServiceStub(channel).Generate(pb.GenerateRequest()))) as responses:
            await anext(responses)
            leaving = asyncio.ensure_future(serving.__aexit__(None, None, None))
            assert (await anext(watch)).status == NOT_SERVING
            yield Left(leaving, responses, channel)


def waits_for(event: asyncio.Event, ended: list[str]) -> Callable[..., Any]:
    """A stream of two messages, the second when `event` is set; `ended` tells how it ended, a moment after it did."""

    async def generate(request: object, context: aio.ServicerContext) -> None:
        how = "cancelled"
        try:
            await context.write(pb.GenerateResponse(sequence=0))
            await event.wait()
            await context.write(pb.GenerateResponse(sequence=1))
            how = "completed"
        finally:
            await asyncio.sleep(0.1)
            ended.append(how)

    return generate


async def test_a_drain_lets_a_running_stream_end() -> None:
    finish, ended = asyncio.Event(), []
    async with left(30, waits_for(finish, ended)) as server:
        finish.set()
        assert [response.sequence async for response in server.responses] == [1]
        await server.leaving
    assert ended == ["completed"]


async def test_a_drain_refuses_new_calls() -> None:
    finish = asyncio.Event()
    async with left(30, waits_for(finish, [])) as server:
        with pytest.raises(Unavailable):
            await unary(InferenceServiceStub(server.channel).GetModel(model_pb2.GetModelRequest()))
        assert not server.leaving.done()
        finish.set()
        await server.leaving


async def test_a_server_that_announces_its_end_takes_new_calls_while_it_says_not_serving() -> None:
    finish = asyncio.Event()
    async with left(30, waits_for(finish, []), announce_seconds=3.0) as server:
        await unary(InferenceServiceStub(server.channel).GetModel(model_pb2.GetModelRequest()))
        assert not server.leaving.done()
        finish.set()
        await server.leaving


async def test_a_drain_ends_watches_of_health_and_does_not_wait_for_them() -> None:
    async with scripted(drain_seconds=30) as peer:
        watch = stream(health_pb2_grpc.HealthStub(peer.channel).Watch(health_pb2.HealthCheckRequest()))
        await anext(watch)
        started = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - started < 25


async def test_what_still_runs_after_the_drain_is_cancelled_and_waited_for() -> None:
    ended: list[str] = []
    async with left(0.1, waits_for(asyncio.Event(), ended)) as server:
        await server.leaving
        assert ended == ["cancelled"]
        with pytest.raises(BatonError):
            await anext(server.responses)


async def test_a_second_cancel_cuts_the_drain_short() -> None:
    ended: list[str] = []
    async with left(30, waits_for(asyncio.Event(), ended)) as server:
        server.leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with timeout(50):
                await server.leaving
        assert ended == ["cancelled"]


@asynccontextmanager
async def grpc_ends_its_own_task() -> AsyncGenerator[None, None]:
    """Calls that began meanwhile have ended without being cancelled: gRPC's core writes into what they own."""
    began: list[asyncio.Task[Any]] = []
    create_task = (loop := asyncio.get_running_loop()).create_task

    def remember(coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        task = create_task(coroutine, **more)
        if getattr(coroutine, "__qualname__", "") == "AioServer._server_main_loop":
            began.append(task)
        return task

    loop.create_task = remember  # type: ignore[assignment]
    yield
    async with timeout(50):
        while not all(task.done() for task in began):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert began
    assert not any(task.cancelled() for task in began)


@pytest.mark.parametrize("turns", range(6))
async def test_a_server_that_is_cancelled_while_it_starts_ends_in_order(turns: int) -> None:
    async with grpc_ends_its_own_task():
        starting = asyncio.ensure_future(serve("127.0.0.1:0", [], health=Health(), options=GRPCIO).__aenter__())
        await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])


@pytest.mark.parametrize("turns", range(6))
async def test_a_server_that_is_cancelled_while_it_stops_ends_in_order(turns: int) -> None:
    async with grpc_ends_its_own_task():
        serving = serve("127.0.0.1:0", [], health=Health(), options=GRPCIO)
        await serving.__aenter__()
        stopping = asyncio.ensure_future(serving.__aexit__(None, None, None))
        await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])


async def test_a_port_is_free_again_when_its_server_has_ended() -> None:
    async with scripted() as peer:
        address = peer.server.address
    async with serve(address, [], health=Health()) as server:
        assert server.address == address
