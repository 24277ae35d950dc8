"""The Python clients: answers without a gap over lost routers, and stopped when nobody wants them any more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from grpc import StatusCode, aio
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.eventually import eventually
from support.servers.tcp_proxy import TcpProxy

from baton import AsyncClient, Client, Resume
from baton.errors import Cancelled, StreamLost, Unavailable
from baton.generation.asynchronous import AsyncGeneration
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.server import host_router
from runtime.aio import timeout

_RESUME = Resume(keep_seconds=5.0, stall_seconds=0.5)
_REQUEST = generate_pb2.GenerateRequest(
    prompt="go on", stopping={"max_tokens": 150, "ignore_eos": True}, sampling={"seed": 4, "temperature": 0.7}
)


@dataclass
class Routers:
    """Two routers, each behind a proxy that a test may cut or freeze."""

    running: Bench
    proxies: list[TcpProxy]

    @property
    def address(self) -> str:
        return ",".join(proxy.address for proxy in self.proxies)


@pytest.fixture
async def routers() -> AsyncIterator[Routers]:
    workers = [simulated(f"worker-{number}", "prefill", "decode", decode_step_seconds=0.005) for number in range(2)]
    async with timeout(40), bench(*workers, proxied=False) as running, AsyncExitStack() as stack:
        other = await stack.enter_async_context(host_router(FAST_ROUTER, running.registry))
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == 2)
        addresses = (running.address, other.address)
        proxies = [await stack.enter_async_context(TcpProxy(address)) for address in addresses]
        yield Routers(running, proxies)
        await eventually(lambda: running.used_blocks() == 0)


async def _expected(routers: Routers) -> str:
    async with AsyncClient(routers.running.address) as client:
        return await client.generate(_REQUEST).text()


@asynccontextmanager
async def _lost_after(routers: Routers, way: str) -> AsyncIterator[asyncio.Event]:
    """Loses the first router once the event is set."""
    begin = asyncio.Event()

    async def lose() -> None:
        await begin.wait()
        proxy = routers.proxies[0]
        if way == "frozen":
            proxy.freeze()
        else:
            await proxy.cut()

    losing = asyncio.create_task(lose())
    try:
        yield begin
    finally:
        losing.cancel()


@pytest.mark.parametrize("way", ["cut", "frozen"])
async def test_an_asynchronous_answer_has_no_gap(routers: Routers, way: str) -> None:
    expected, text, numbers = await _expected(routers), "", []
    async with _lost_after(routers, way) as lose, AsyncClient(routers.address, resume=_RESUME) as client:
        generation = client.generate(_REQUEST)
        async for event in generation:
            text += event.token.text
            numbers.append(event.sequence)
            if len(text) > 20:
                lose.set()
    assert text == expected
    assert numbers == list(range(len(numbers)))
    assert (generation.resumptions, generation.recomputations) == (1, 0)


@pytest.mark.parametrize("way", ["cut", "frozen"])
async def test_a_synchronous_answer_has_no_gap(routers: Routers, way: str) -> None:
    expected, loop = await _expected(routers), asyncio.get_running_loop()
    async with _lost_after(routers, way) as lose:

        def read() -> tuple[str, int]:
            text = ""
            with Client(routers.address, resume=_RESUME) as client:
                generation = client.generate(_REQUEST)
                for event in generation:
                    text += event.token.text
                    if len(text) > 20:
                        loop.call_soon_threadsafe(lose.set)
            return text, generation.resumptions

        assert await asyncio.to_thread(read) == (expected, 1)


async def _text(generation: AsyncGeneration, lose: asyncio.Event) -> str:
    text = ""
    async for event in generation:
        text += event.token.text
        if len(text) > 20:
            lose.set()
    return text


async def test_a_router_that_hangs_is_left_before_its_stall_seconds_are_over(routers: Routers) -> None:
    expected = await _expected(routers)
    patient = Resume(keep_seconds=20.0, stall_seconds=20.0)
    async with _lost_after(routers, "frozen") as lose, AsyncClient(routers.address, resume=patient) as client:
        generation = client.generate(_REQUEST)
        async with timeout(9):
            assert await _text(generation, lose) == expected
    assert (generation.resumptions, generation.recomputations) == (1, 0)


async def test_a_router_that_hangs_is_left_by_a_thread_too(routers: Routers) -> None:
    expected, loop = await _expected(routers), asyncio.get_running_loop()
    patient = Resume(keep_seconds=20.0, stall_seconds=20.0)
    async with _lost_after(routers, "frozen") as lose:

        def read() -> str:
            text = ""
            with Client(routers.address, resume=patient) as client:
                for event in client.generate(_REQUEST):
                    text += event.token.text
                    if len(text) > 20:
                        loop.call_soon_threadsafe(lose.set)
            return text

        async with timeout(9):
            assert await asyncio.to_thread(read) == expected


class _EndsBadly(inference_service_pb2_grpc.InferenceServiceServicer):
    """A router that is lost after the last message of an answer, before its status."""

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        yield generate_pb2.GenerateResponse(started={"resumption": {"handle": "b1.x"}})  # type: ignore[arg-type]
        yield generate_pb2.GenerateResponse(token={"text": "whole", "token_ids": [1]})  # type: ignore[arg-type]
        yield generate_pb2.GenerateResponse(finished={})  # type: ignore[arg-type]
        await context.abort(StatusCode.UNAVAILABLE, "Socket closed")


async def test_an_answer_whose_status_alone_is_missing_is_whole() -> None:
    server = aio.server()
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(_EndsBadly(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with timeout(20), AsyncClient(address, resume=_RESUME) as client:
            assert await client.generate("a").text() == "whole"

        def read() -> str:
            with Client(address, resume=_RESUME) as client:
                return client.generate("a").text()

        assert await asyncio.to_thread(read) == "whole"
    finally:
        await server.stop(None)


class _NeverGoesOn(inference_service_pb2_grpc.InferenceServiceServicer):
    """A router that loses an answer after its first message, and cannot go on with it."""

    def __init__(self) -> None:
        self.refused = asyncio.Event()

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        yield generate_pb2.GenerateResponse(started={"resumption": {"handle": "b1.x"}})  # type: ignore[arg-type]
        await context.abort(StatusCode.UNAVAILABLE, "Socket closed")

    async def ResumeGeneration(  # type: ignore[override]
        self, request: generate_pb2.ResumeGenerationRequest, context: Any
    ) -> AsyncIterator[Any]:
        self.refused.set()
        await context.abort(StatusCode.UNAVAILABLE, "Socket closed")
        yield  # makes it a stream


@asynccontextmanager
async def _never_going_on() -> AsyncIterator[tuple[str, asyncio.Event]]:
    server, servicer = aio.server(), _NeverGoesOn()
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with timeout(20):
            yield address, servicer.refused
    finally:
        await server.stop(None)


async def test_closing_the_client_ends_an_answer_that_is_being_resumed_as_cancelled() -> None:
    async with _never_going_on() as (address, refused):
        client = Client(address, resume=_RESUME)
        reading = asyncio.ensure_future(asyncio.to_thread(client.generate("a").text))
        await refused.wait()
        await asyncio.to_thread(client.close)
        with pytest.raises(Cancelled):
            await reading


async def test_closing_the_asynchronous_client_ends_an_answer_that_is_being_resumed_as_cancelled() -> None:
    async with _never_going_on() as (address, refused):
        client = AsyncClient(address, resume=_RESUME)
        reading = asyncio.ensure_future(client.generate("a").text())
        await refused.wait()
        await client.close()
        with pytest.raises(Cancelled):
            await reading


async def test_a_closed_client_refuses_calls_as_cancelled() -> None:
    client, asynchronous = Client("127.0.0.1:1"), AsyncClient("127.0.0.1:1")
    client.close()
    await asynchronous.close()
    with pytest.raises(Cancelled):
        client.models()
    with pytest.raises(Cancelled):
        client.generate("a").text()
    with pytest.raises(Cancelled):
        await asynchronous.models()
    with pytest.raises(Cancelled):
        await asynchronous.generate("a").text()


async def test_all_streams_of_a_client_leave_a_router_that_hangs(routers: Routers) -> None:
    expected = await _expected(routers)
    resume = Resume(keep_seconds=8.0, stall_seconds=0.6)
    async with AsyncClient(routers.address, resume=resume) as client, _lost_after(routers, "frozen") as begin:

        async def read() -> tuple[str, int]:
            generation = client.generate(_REQUEST)
            text = ""
            async with generation as events:
                async for event in events:
                    text += event.token.text
                    if len(text) > 20:
                        begin.set()
            return text, generation.resumptions

        found = await asyncio.gather(*(read() for _ in range(6)))
    assert [text for text, _ in found] == [expected] * 6
    assert all(resumptions >= 1 for _, resumptions in found)


async def test_leaving_a_kept_answer_stops_it(routers: Routers) -> None:
    long = generate_pb2.GenerateRequest(prompt="a", stopping={"max_tokens": 2000, "ignore_eos": True})
    async with AsyncClient(routers.address, resume=_RESUME) as client:
        async with client.generate(long) as events:
            async for event in events:
                if event.HasField("token"):
                    break
        await eventually(lambda: routers.running.used_blocks() == 0)

    def leave() -> None:
        with Client(routers.address, resume=_RESUME) as client, client.generate(long) as events:
            for event in events:
                if event.HasField("token"):
                    return

    await asyncio.to_thread(leave)
    await eventually(lambda: routers.running.used_blocks() == 0)


async def test_another_process_reads_an_answer_by_its_handle(routers: Routers) -> None:
    expected = await _expected(routers)
    async with AsyncClient(routers.address, resume=_RESUME) as client:
        first = client.generate(_REQUEST)
        async for event in first:
            if event.HasField("token"):
                break
        assert await client.resume(first.handle).text() == expected
        with pytest.raises(StreamLost):
            await client.resume(first.handle[:30] + "AAAA" + first.handle[34:]).text()


async def test_without_resume_a_lost_router_is_an_error_and_nothing_is_kept(routers: Routers) -> None:
    async with _lost_after(routers, "cut") as lose, AsyncClient(routers.address) as client:
        events = client.generate(_REQUEST)
        assert not (await anext(events)).started.HasField("resumption")
        lose.set()
        with pytest.raises(Unavailable):
            await events.text()
    assert events.handle == ""


async def test_calls_go_to_the_next_router_when_the_first_is_lost(routers: Routers) -> None:
    await routers.proxies[0].cut()
    async with AsyncClient(routers.address) as client:
        assert [model.name for model in await client.models()] == ["demo"]
        assert await client.generate(_REQUEST).text()
