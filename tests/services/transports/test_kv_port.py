"""The tcp transport's port and peers without a token: they cannot hold resources for long, or stop others."""

import asyncio
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.certificates import worker_tls
from support.eventually import eventually
from support.transports.grants import HANDOFF_ID, EveryBlock

from baton.engine.v1 import handoff_pb2
from rpc.auth.tls import TlsConfig
from runtime.aio import timeout
from services.engines.memory.shared_pool import SharedPool
from services.transports import tcp_server
from services.transports.base import PoolShape, Transfer
from services.transports.frames import COUNT, ID_LENGTH, MAGIC
from services.transports.registry import open_transports
from services.transports.secure import OwnerTls
from services.transports.tcp_server import PoolServer, serve_pool

BLOCKS, BLOCK_BYTES = 4, 1024
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds: closing resets the connection


@asynccontextmanager
async def port(tls: TlsConfig | None = None) -> AsyncIterator[PoolServer]:
    with SharedPool(BLOCKS, BLOCK_BYTES) as pool:
        async with serve_pool(pool, "127.0.0.1", EveryBlock(), None if tls is None else OwnerTls(tls)) as server:
            yield server


async def pull(server: PoolServer, tls: TlsConfig | None = None) -> None:
    """Reads as a reader does, within twenty seconds."""
    endpoint = server.endpoint("127.0.0.1")
    opening = open_transports(("tcp",), tls=tls)
    async with opening as [transport]:
        with SharedPool(BLOCKS, BLOCK_BYTES) as ours:
            async with timeout(20):
                reader = await transport.open(endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
                try:
                    await reader.pull(Transfer([1], ours, [2], time.monotonic() + 20, HANDOFF_ID))
                finally:
                    reader.close()


def connect(endpoint: handoff_pb2.TransportEndpoint) -> socket.socket:
    return socket.create_connection((endpoint.tcp.host, endpoint.tcp.port), timeout=60)


async def test_over_tls_peers_that_send_a_byte_and_reset_take_no_place(tmp_path: Path) -> None:
    tls = worker_tls(tmp_path)
    async with port(tls) as server:
        for _ in range(tcp_server.MAX_CONNECTIONS + 50):
            with connect(server.endpoint("127.0.0.1")) as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                peer.send(b"x")
        await eventually(lambda: server.num_connections == 0)
        await pull(server, tls)


async def test_a_process_without_file_descriptors_accepts_again_once_it_has_some() -> None:
    async with port() as server:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with ExitStack() as undo:
            waiting = undo.enter_context(socket.socket())
            undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, limits[1]))
            await asyncio.to_thread(waiting.connect, ("127.0.0.1", server.port))
            await eventually(lambda: server.accept_failures > 0)
        await pull(server)


async def test_connections_that_never_say_anything_do_not_keep_readers_out() -> None:
    async with port() as server:
        with ExitStack() as silent:
            for _ in range(tcp_server.MAX_CONNECTIONS):
                silent.enter_context(connect(server.endpoint("127.0.0.1")))
            await pull(server)


async def test_readers_with_a_token_are_not_put_out_by_connections_without_one() -> None:
    async with port() as server:
        endpoint = server.endpoint("127.0.0.1")
        with connect(endpoint) as reader, ExitStack() as silent:
            reader.sendall(MAGIC + endpoint.tcp.token)
            await eventually(lambda: server.num_readers == 1)
            for _ in range(2 * tcp_server.MAX_GREETING):
                silent.enter_context(connect(endpoint))
            reader.sendall(
                ID_LENGTH.pack(len(HANDOFF_ID)) + HANDOFF_ID.encode() + COUNT.pack(1) + (3).to_bytes(4, "little")
            )
            assert len(await asyncio.to_thread(reader.recv, COUNT.size)) == COUNT.size


@pytest.mark.parametrize("is_tls", [False, True], ids=["tcp", "tls"])
async def test_a_greeting_has_one_deadline_however_many_bytes_come_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tls: bool
) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_SECONDS", 0.5)
    async with port(worker_tls(tmp_path) if is_tls else None) as server:
        with connect(server.endpoint("127.0.0.1")) as slow:
            slow.settimeout(0.1)
            async with timeout(20):
                assert await asyncio.to_thread(_drip, slow) < 30


def _drip(slow: socket.socket) -> int:
    """Sends a byte at a time until the owner closes the connection; returns the number of bytes."""
    for count in range(100):
        try:
            slow.send(b"\x16")
            if slow.recv(1) == b"":
                return count
        except TimeoutError:
            continue
        except OSError:
            return count
    return 100
