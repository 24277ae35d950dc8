"""A reader of several owners over tcp: the failure of one owner does not affect the others."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest
from support.eventually import eventually
from support.transports.grants import HANDOFF_ID, EveryBlock

from baton.engine.v1 import handoff_pb2
from runtime.aio import timeout
from services.engines.memory.shared_pool import SharedPool
from services.transports.base import PoolShape, Transfer, TransportUnavailable
from services.transports.frames import MAGIC, TOKEN_BYTES
from services.transports.registry import open_transports
from services.transports.tcp import TcpTransport
from services.transports.tcp_server import PoolServer, serve_pool

BLOCKS, BLOCK_BYTES = 4, 1024


@pytest.fixture
def ours() -> Iterator[SharedPool]:
    with SharedPool(BLOCKS, BLOCK_BYTES) as pool:
        yield pool


@pytest.fixture
async def transport() -> AsyncIterator[TcpTransport]:
    async with open_transports(("tcp",)) as [opened]:
        assert isinstance(opened, TcpTransport)
        yield opened


@asynccontextmanager
async def owner() -> AsyncIterator[PoolServer]:
    with SharedPool(BLOCKS, BLOCK_BYTES) as pool:
        pool.block(1)[:] = b"x" * BLOCK_BYTES
        async with serve_pool(pool, "127.0.0.1", EveryBlock()) as server:
            yield server


def transfer(ours: SharedPool, seconds: float) -> Transfer:
    return Transfer([1], ours, [2], time.monotonic() + seconds, HANDOFF_ID)


async def test_an_owner_that_is_silent_does_not_hold_up_pulls_from_another(
    ours: SharedPool, transport: TcpTransport
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        named = handoff_pb2.TcpEndpoint(host="127.0.0.1", port=frozen.getsockname()[1], token=bytes(TOKEN_BYTES))
        silent = await transport.open(handoff_pb2.TransportEndpoint(tcp=named), PoolShape(BLOCKS, BLOCK_BYTES))
        stuck = [asyncio.create_task(silent.pull(transfer(ours, 60))) for _ in range(20)]
        with ExitStack() as accepted:
            frozen.setblocking(False)
            connections: list[socket.socket] = []
            await eventually(lambda: _num_asked(frozen, connections, accepted) >= 8)
            await _pull_from_a_healthy_owner(transport, ours)
            assert not any(task.done() for task in stuck)
            for task in stuck:
                task.cancel()
            async with timeout(20):
                await asyncio.gather(*stuck, return_exceptions=True)
            silent.close()


def _num_asked(listener: socket.socket, connections: list[socket.socket], stack: ExitStack) -> int:
    """The number of connections that have sent more than their greeting, and wait for an answer."""
    with suppress(BlockingIOError):
        while True:
            connections.append(stack.enter_context(listener.accept()[0]))
    peeked = 0
    for connection in connections:
        with suppress(BlockingIOError):
            said = connection.recv(200, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            peeked += len(said) > len(MAGIC) + TOKEN_BYTES
    return peeked


async def _pull_from_a_healthy_owner(transport: TcpTransport, ours: SharedPool) -> None:
    async with owner() as healthy, timeout(20):
        reader = await transport.open(healthy.endpoint("127.0.0.1"), PoolShape(BLOCKS, BLOCK_BYTES))
        await asyncio.gather(*(reader.pull(transfer(ours, 20)) for _ in range(8)))
        reader.close()
    assert bytes(ours.block(2)) == b"x" * BLOCK_BYTES


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name `pool.test` has two addresses; nothing listens at the first."""
    known = socket.getaddrinfo

    def resolve(host: str, port: int, *arguments: object, **options: object) -> list[object]:
        hosts = ("127.0.0.2", "127.0.0.1") if host == "pool.test" else (host,)
        return [found for one in hosts for found in known(one, port, *arguments, **options)]  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.usefixtures("two_addresses")
async def test_every_address_of_a_name_is_tried(ours: SharedPool, transport: TcpTransport) -> None:
    async with owner() as server:
        reader = await transport.open(server.endpoint("pool.test"), PoolShape(BLOCKS, BLOCK_BYTES))
        await reader.pull(transfer(ours, 5))
        reader.close()
    assert bytes(ours.block(2)) == b"x" * BLOCK_BYTES


@pytest.mark.usefixtures("two_addresses")
async def test_an_owner_at_no_address_is_unavailable(transport: TcpTransport) -> None:
    async with owner() as server:
        endpoint = server.endpoint("pool.test")
    with pytest.raises(TransportUnavailable, match=r"pool\.test"):
        await transport.open(endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
