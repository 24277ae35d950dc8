"""The tcp transport, the reader's side: requests blocks from an owner's server, and receives them into place."""

import array
import asyncio
import contextlib
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.engine.v1 import handoff_pb2
from runtime.aio import timeout, wait_until_done
from runtime.clock import monotonic
from services.engines.kv import BlockMemory
from services.transports.base import (
    Endpoint,
    Exposure,
    PoolShape,
    Transfer,
    TransferFailed,
    Transport,
    TransportContext,
    TransportUnavailable,
)
from services.transports.frames import COUNT, ID_LENGTH, MAGIC, is_silent, limit_waits, receive_all, send_all, shut
from services.transports.secure import OwnerTls, ReaderTls
from services.transports.tcp_server import serve_pool

_LONGEST_HOST = 253  # characters of a name in DNS
_CONNECT_SECONDS = 5.0
# The longest silence of an owner during an answer.
_SILENCE_SECONDS = 10.0
# Threads for each owner, so that a stuck owner delays only its own readers.
_THREADS = 8


class TcpTransport(Transport):
    """Serves pools on ports of their own, and reads other pools over sockets, with a few threads for each owner."""

    name = "tcp"
    supports_tls = True
    reads_early = True

    def __init__(self, context: TransportContext) -> None:
        self._tls = None if context.tls is None else ReaderTls(context.tls)
        self._servers = contextlib.AsyncExitStack()

    async def __aexit__(self, *exception: object) -> None:
        """Closes the servers. Readers' threads end when the readers are closed."""
        await self._servers.aclose()

    async def offer(self, memory: BlockMemory, exposure: Exposure) -> Endpoint | None:
        """Serves the blocks that the guard allows, on a free port. See Transport."""
        tls = None if exposure.tls is None else OwnerTls(exposure.tls)
        serving = serve_pool(memory, exposure.listen_host, exposure.guard, tls)
        server = await self._servers.enter_async_context(serving)
        return server.endpoint(exposure.advertised_host)

    async def open(self, endpoint: Endpoint, shape: PoolShape) -> "TcpPool":
        """Connects. The owner knows its pool's shape and checks every request. See Transport."""
        del shape
        if not 0 < len(endpoint.tcp.host) <= _LONGEST_HOST or not 0 < endpoint.tcp.port < 2**16:
            raise TransportUnavailable(f"{endpoint.tcp.host[:80]!r}:{endpoint.tcp.port} is not an address")
        pool = TcpPool(endpoint.tcp, self._tls)
        with contextlib.ExitStack() as undo:
            undo.callback(pool.close)
            try:
                pool.give_back(await pool.connect())
            except (OSError, ValueError) as error:  # ValueError: no name by the rules of DNS
                why = str(error)[:200] or f"nothing within {_CONNECT_SECONDS:g} s"
                raise TransportUnavailable(
                    f"cannot connect to {endpoint.tcp.host}:{endpoint.tcp.port}: {why}"
                ) from error
            undo.pop_all()
        return pool


class TcpPool:
    """One owner's pool, and the idle connections to it."""

    def __init__(self, endpoint: handoff_pb2.TcpEndpoint, tls: ReaderTls | None) -> None:
        self._tls = tls
        self._endpoint = endpoint
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="kv-receive")
        self._idle: list[socket.socket] = []

    async def pull(self, transfer: Transfer) -> None:
        """Receives in a thread. See PoolReader."""
        try:
            connection = self._acquire() or await self.connect()
        except (OSError, ValueError) as error:
            raise TransferFailed(f"cannot connect: {error}") from error
        request = _Request(connection, transfer)
        submitted = self._threads.submit(request.run)
        receiving = asyncio.wrap_future(submitted)
        try:
            await asyncio.shield(receiving)
        except OSError as error:
            raise TransferFailed(str(error) or "the owner does not answer") from error
        finally:
            request.stop_unless_done()
            # If it still waits for a thread; a running call was stopped above, and ends by itself.
            submitted.cancel()
            await wait_until_done(receiving)
            self._keep_or_close(connection, request)

    def close(self) -> None:
        """Closes the idle connections, and ends the idle threads."""
        while self._idle:
            self._idle.pop().close()
        self._threads.shutdown(wait=False)

    async def connect(self) -> socket.socket:
        """Returns a new connection to the first of the owner's addresses that answers, with the token sent. Raises
        OSError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CONNECT_SECONDS
        async with timeout(_CONNECT_SECONDS):
            found = await loop.getaddrinfo(self._endpoint.host, self._endpoint.port, type=socket.SOCK_STREAM)
        error: Exception = OSError(f"{self._endpoint.host} has no address")
        for index, (family, _, _, _, address) in enumerate(found):
            try:
                # Each address gets its share of the time, so that a silent one leaves some for the others.
                async with timeout((deadline - loop.time()) / (len(found) - index)):
                    return await self._connect(family, address)
            except OSError as failed:
                error = failed
        raise error

    async def _connect(self, family: int, address: tuple[Any, ...]) -> socket.socket:
        connection = socket.socket(family, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(True)
            submitted = self._threads.submit(self._say_hello, connection)
            saying_hello = asyncio.wrap_future(submitted)
            try:
                connection = await asyncio.shield(saying_hello)
            except asyncio.CancelledError:
                shut(connection)
                submitted.cancel()
                await wait_until_done(saying_hello)
                raise
            undo.pop_all()
        return connection

    def _say_hello(self, connection: socket.socket) -> socket.socket:
        if self._tls is not None:
            connection.settimeout(_CONNECT_SECONDS)
            connection = self._tls.connect(connection, self._endpoint.host)
        limit_waits(connection, _CONNECT_SECONDS)
        send_all(connection, [memoryview(MAGIC + self._endpoint.token)])
        return connection

    def give_back(self, connection: socket.socket) -> None:
        """Keeps a connection for the next pull."""
        self._idle.append(connection)

    def _acquire(self) -> socket.socket | None:
        while self._idle:
            connection = self._idle.pop()
            if is_silent(connection):
                return connection
            connection.close()
        return None

    def _keep_or_close(self, connection: socket.socket, request: "_Request") -> None:
        # After an incomplete answer, the next bytes of the connection are unknown.
        if request.complete:
            self.give_back(connection)
        else:
            connection.close()


class _Request:
    """One request and its answer on one connection. Runs in a thread; any other thread can stop it."""

    def __init__(self, connection: socket.socket, transfer: Transfer) -> None:
        self.complete = False
        self._connection = connection
        self._transfer = transfer
        self._stopped = threading.Event()

    def stop_unless_done(self) -> None:
        """Stops the thread at once; no more bytes arrive after that."""
        if not self.complete:
            self._stopped.set()
            shut(self._connection)

    def run(self) -> None:
        """Requests, receives and commits. Raises OSError."""
        transfer = self._transfer
        if self._stopped.is_set():
            raise ConnectionError("stopped")
        self._limit_wait()
        send_all(self._connection, [memoryview(_question(transfer))])
        header = bytearray(COUNT.size)
        for _ in receive_all(self._connection, [memoryview(header)]):
            (num_bytes,) = COUNT.unpack(header)
        if num_bytes != transfer.num_bytes:
            raise ConnectionError(f"the owner sends {num_bytes} bytes for {transfer.num_bytes}")
        writer = transfer.memory.write(transfer.destination)
        for _ in receive_all(self._connection, writer.views):
            self._limit_wait()
        writer.commit()
        self.complete = True

    def _limit_wait(self) -> None:
        remaining = self._transfer.deadline - monotonic()
        if remaining <= 0:
            raise TimeoutError("deadline exceeded")
        limit_waits(self._connection, min(_SILENCE_SECONDS, remaining))


def _question(transfer: Transfer) -> bytes:
    ids = array.array("I", transfer.source)
    if sys.byteorder == "big":
        ids.byteswap()
    handoff_id = transfer.handoff_id.encode()[:255]
    return ID_LENGTH.pack(len(handoff_id)) + handoff_id + COUNT.pack(len(ids)) + ids.tobytes()
