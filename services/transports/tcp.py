"""The reader's side of the tcp transport: asks an owner for blocks, and receives them where they belong."""

import array
import asyncio
import contextlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from baton.engine.v1 import handoff_pb2

from rpc.aio import timeout
from rpc.settle import settle
from services.transports.frames import COUNT, MAGIC, is_silent, limit_waits, receive_all, send_all, shut
from services.transports.secure import ReaderTls
from services.transports.transport import Transfer, TransferFailed, TransportUnavailable

_CONNECT_SECONDS = 5.0
# An owner that sends nothing for so long sends nothing any more.
_SILENCE_SECONDS = 10.0
_THREADS = 8


class TcpTransport:
    """Reads pools over sockets, each pull in a thread."""

    name = "tcp"

    def __init__(self, tls: ReaderTls | None = None) -> None:
        self._tls = tls
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="kv-receive")

    def __enter__(self) -> "TcpTransport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    async def open(self, endpoint: handoff_pb2.TransportEndpoint, num_blocks: int, block_bytes: int) -> "TcpPool":
        """Connects. See Transport; the owner knows its pool's shape and checks every request."""
        del num_blocks, block_bytes
        pool = TcpPool(endpoint.tcp, self._threads, self._tls)
        try:
            pool.give_back(await pool.connect())
        except (OSError, asyncio.TimeoutError) as error:
            raise TransportUnavailable(f"cannot connect to {endpoint.tcp.host}:{endpoint.tcp.port}: {error}") from error
        return pool


class TcpPool:
    """One owner's pool, and the connections to it that are idle."""

    def __init__(self, endpoint: handoff_pb2.TcpEndpoint, threads: ThreadPoolExecutor, tls: ReaderTls | None) -> None:
        self._tls = tls
        self._endpoint = endpoint
        self._threads = threads
        self._idle: list[socket.socket] = []

    async def pull(self, transfer: Transfer) -> None:
        """Receives in a thread. See PoolReader."""
        try:
            connection = self._take() or await self.connect()
        except (OSError, asyncio.TimeoutError) as error:
            raise TransferFailed(f"cannot connect: {error}") from error
        request = _Request(connection, transfer)
        receiving = asyncio.get_running_loop().run_in_executor(self._threads, request.run)
        try:
            await asyncio.shield(receiving)
        except OSError as error:
            raise TransferFailed(str(error) or "the owner went silent") from error
        finally:
            request.stop_unless_done()
            await settle(receiving)
            self._keep_or_close(connection, request)

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def connect(self) -> socket.socket:
        """A new connection, with the token sent. Raises OSError."""
        loop = asyncio.get_running_loop()
        host, port = self._endpoint.host, self._endpoint.port
        async with timeout(_CONNECT_SECONDS):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            connection = socket.socket(family, kind, protocol)
            with contextlib.ExitStack() as undo:
                undo.callback(connection.close)
                connection.setblocking(False)
                await loop.sock_connect(connection, address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setblocking(True)
                saying_hello = loop.run_in_executor(self._threads, self._say_hello, connection)
                try:
                    connection = await asyncio.shield(saying_hello)
                except asyncio.CancelledError:
                    shut(connection)
                    await settle(saying_hello)
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

    def _take(self) -> socket.socket | None:
        while self._idle:
            connection = self._idle.pop()
            if is_silent(connection):
                return connection
            connection.close()
        return None

    def _keep_or_close(self, connection: socket.socket, request: "_Request") -> None:
        # After anything but a whole answer, what comes next on the connection is not known.
        if request.complete:
            self.give_back(connection)
        else:
            connection.close()


class _Request:
    """One question and its answer on one connection, asked in a thread, and stopped from any other."""

    def __init__(self, connection: socket.socket, transfer: Transfer) -> None:
        self.complete = False
        self._connection = connection
        self._transfer = transfer
        self._stopped = threading.Event()

    def stop_unless_done(self) -> None:
        """Makes the thread end at once: from then on nothing can arrive."""
        if not self.complete:
            self._stopped.set()
            shut(self._connection)

    def run(self) -> None:
        """Asks, receives and commits. Raises OSError."""
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
        remaining = self._transfer.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("it took too long")
        limit_waits(self._connection, min(_SILENCE_SECONDS, remaining))


def _question(transfer: Transfer) -> bytes:
    ids = array.array("I", transfer.source)
    if sys.byteorder == "big":
        ids.byteswap()
    return COUNT.pack(len(ids)) + ids.tobytes()
