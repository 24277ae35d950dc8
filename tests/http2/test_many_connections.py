"""More connections than a process has file descriptors for: others are still answered."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from grpc import aio
from hyperframe.frame import DataFrame
from support.eventually import eventually
from support.http2.peer import message, peer_of
from support.http2.process import ServerProcess, server_process
from support.http2.server import path

LIMIT, ENHANCE_YOUR_CALM = 256, 11


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process(LIMIT) as process:
        yield process


@asynccontextmanager
async def crowd(server: ServerProcess, size: int) -> AsyncGenerator[list[socket.socket], None]:
    """Connections that say nothing."""
    sockets = []
    try:
        for _ in range(size):
            each = socket.socket()
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect(("127.0.0.1", server.port))
            sockets.append(each)
            await asyncio.sleep(0)
        yield sockets
    finally:
        for each in sockets:
            each.close()


def closed(each: socket.socket) -> bytes | None:
    """The server's last words; None if it has not closed the connection."""
    said = b""
    with suppress(BlockingIOError, ConnectionError):
        while piece := each.recv(65_536):
            said += piece
        return said
    return None


async def asked(server: ServerProcess) -> bytes:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        return await channel.unary_unary(path("unary"))(b"hello", timeout=20)


async def test_a_new_client_is_answered_beside_more_idle_connections_than_descriptors(server: ServerProcess) -> None:
    async with crowd(server, 3 * LIMIT) as sockets:
        for _ in range(10):
            assert await asked(server) == b"hello"
        assert server.descriptors() < LIMIT * 7 / 8
        ends: list[bytes] = []

        def enough_closed() -> bool:
            ends.extend(said for each in sockets if (said := closed(each)))
            return len(ends) > LIMIT

        await eventually(enough_closed)
        assert all(b"too many connections" in said for said in ends)
        # The first to come were idle for the longest time.
        assert closed(sockets[-1]) is None


async def test_connections_whose_calls_run_are_not_closed_for_idle_ones(server: ServerProcess) -> None:
    async with peer_of(server.port) as peer:
        await peer.call(1, "bidi", b"before", end=False)
        await peer.until(lambda: bool(peer.answer(1).messages))
        async with crowd(server, 2 * LIMIT):
            assert await asked(server) == b"hello"
            await peer.send(DataFrame(1, message(b"after"), flags=["END_STREAM"]))
            assert (await peer.ended(1)).messages == [b"before", b"after"]


async def test_a_server_whose_connections_are_all_busy_refuses_more_and_answers_those(server: ServerProcess) -> None:
    async with AsyncExitStack() as stack:
        peers = []
        for _ in range(LIMIT):
            peer = await stack.enter_async_context(peer_of(server.port))
            await peer.call(1, "bidi", b"x", end=False)
            with suppress(AssertionError):
                await peer.until(lambda: bool(peer.answer(1).messages))  # noqa: B023
            if not peer.answer(1).messages:
                break
            peers.append(peer)
        assert LIMIT / 2 < len(peers) < LIMIT
        assert peer.goaway is None or peer.goaway.error_code == ENHANCE_YOUR_CALM
        for each in peers:
            await each.send(DataFrame(1, message(b"y"), flags=["END_STREAM"]))
            assert (await each.ended(1)).messages == [b"x", b"y"]
        # They are idle now.
        assert await asked(server) == b"hello"
