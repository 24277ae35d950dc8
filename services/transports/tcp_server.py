"""The tcp transport, the owner's side: sends blocks to readers that name their handoff, with a thread a connection."""

import array
import asyncio
import hmac
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import structlog

from baton.engine.v1 import handoff_pb2
from runtime.clock import monotonic
from runtime.entropy import token_bytes
from runtime.threads import start_thread
from services.engines.kv import BlockMemory
from services.transports.base import Endpoint, ReadGuard
from services.transports.frames import (
    COUNT,
    ID_LENGTH,
    MAGIC,
    TOKEN_BYTES,
    limit_waits,
    receive_before,
    receive_exactly,
    send_all,
    shut,
)
from services.transports.secure import OwnerTls

log = structlog.get_logger(__name__)

HELLO_SECONDS = 5.0
"""The time until the first request, TLS included, however slowly bytes arrive."""
MAX_CONNECTIONS = 256
"""The most connections that have sent the token."""
MAX_GREETING = 64
"""The most connections that have not sent the token. One more closes the oldest, so silent peers cannot block readers.
"""

# Between two requests. Readers keep their connections, and notice when one was closed.
_IDLE_SECONDS = 300.0
_STUCK_SECONDS = 30.0
_READ_BYTES = 64 * 1024 * 1024
# After a failed accept, as when file descriptors run out. Waiting connections stay in the backlog.
_ACCEPT_AGAIN_SECONDS = 0.1


class _Connection:
    """One connection and its thread. With TLS, `socket` becomes the TLS socket."""

    def __init__(self, accepted: socket.socket, serve: "Callable[[_Connection], None]") -> None:
        self.socket = accepted
        self.greet_until = monotonic() + HELLO_SECONDS
        self.thread = threading.Thread(target=serve, args=(self,), name="kv-send", daemon=True)


class PoolServer:
    """A pool, offered on a port. Its threads never use the event loop."""

    def __init__(self, memory: BlockMemory, host: str, guard: ReadGuard, tls: OwnerTls | None = None) -> None:
        self._guard = guard
        self._tls = tls
        self._memory = memory
        self._token = token_bytes(TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.accept_failures = 0
        self._greeting: dict[_Connection, None] = {}
        self._readers: dict[_Connection, None] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._accepting = start_thread(self._accept, name="kv-accept")

    @property
    def num_readers(self) -> int:
        """The number of connections that have sent the token."""
        return len(self._readers)

    @property
    def num_connections(self) -> int:
        """The number of connections."""
        with self._lock:
            return len(self._readers) + len(self._greeting)

    def endpoint(self, host: str) -> Endpoint:
        """The endpoint for readers, with the host name that they know."""
        tcp = handoff_pb2.TcpEndpoint(host=host, port=self.port, token=self._token)
        return Endpoint(tcp=tcp)

    def close(self) -> None:
        """Ends every connection and waits for its thread. Blocking."""
        self._closing.set()
        shut(self._listener)
        self._accepting.join()
        with self._lock:
            connections = [*self._greeting, *self._readers]
            for connection in connections:
                shut(connection.socket)
        for connection in connections:
            connection.thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self.accept_failures += 1
                    log.warning("could not accept a reader", error=str(error))
                    self._closing.wait(_ACCEPT_AGAIN_SECONDS)
                continue
            self._begin(_Connection(accepted, self._serve))

    def _begin(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._greeting) >= MAX_GREETING:
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]
                shut(oldest.socket)
            self._greeting[connection] = None
        try:
            connection.thread.start()
        except RuntimeError as error:  # no more threads
            log.warning("could not serve a reader", error=str(error))
            self._end(connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            certificate = self._greet(connection)
            self._answer_all(connection.socket, certificate)
        except OSError as error:
            log.debug("a reader's connection ended", error=str(error))
        finally:
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        with self._lock:
            self._greeting.pop(connection, None)
            self._readers.pop(connection, None)
            connection.socket.close()

    def _greet(self, connection: _Connection) -> str:
        """Checks the token; returns the URI in the reader's certificate, or an empty string. Raises OSError for other
        peers.
        """
        certificate = ""
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_waits(connection.socket, HELLO_SECONDS)
        if self._tls is not None:
            certificate = self._tls.shake_hands(self._secure(connection, self._tls))
        hello = receive_before(connection.socket, len(MAGIC) + TOKEN_BYTES, connection.greet_until)
        if not hmac.compare_digest(hello, MAGIC + self._token):
            raise ConnectionError("wrong token")
        with self._lock:
            if connection not in self._greeting or len(self._readers) >= MAX_CONNECTIONS:
                raise ConnectionError(f"there are {len(self._readers)} readers already")
            del self._greeting[connection]
            self._readers[connection] = None
        return certificate

    def _secure(self, connection: _Connection, tls: OwnerTls) -> ssl.SSLSocket:
        """Returns the TLS socket in place of the plain one, which must not be used any more."""
        with self._lock:
            secure = tls.wrap(connection.socket)
            connection.socket = secure
        secure.settimeout(max(0.001, connection.greet_until - monotonic()))
        return secure

    def _answer_all(self, connection: socket.socket, certificate: str) -> None:
        while True:
            limit_waits(connection, _IDLE_SECONDS)
            (length,) = ID_LENGTH.unpack(receive_exactly(connection, ID_LENGTH.size))
            deadline = monotonic() + _STUCK_SECONDS
            handoff_id = receive_before(connection, length, deadline).decode("ascii", "replace")
            (count,) = COUNT.unpack(receive_before(connection, COUNT.size, deadline))
            block_ids = self._checked(_receive_ids(connection, self._limited(count), deadline))
            if not self._guard.may_read(handoff_id, certificate, block_ids):
                raise ConnectionError("no handoff that is held covers these blocks")
            limit_waits(connection, _STUCK_SECONDS)
            send_all(connection, self._answer(block_ids))

    def _answer(self, block_ids: Sequence[int]) -> Iterator[memoryview]:
        yield memoryview(COUNT.pack(len(block_ids) * self._memory.block_bytes))
        stride = max(1, _READ_BYTES // self._memory.block_bytes)
        for start in range(0, len(block_ids), stride):
            yield from self._memory.read(block_ids[start : start + stride])

    def _limited(self, count: int) -> int:
        if not 0 < count <= self._memory.num_blocks:
            raise ConnectionError(f"asked for {count} of {self._memory.num_blocks} blocks")
        return count

    def _checked(self, block_ids: Sequence[int]) -> Sequence[int]:
        if max(block_ids) >= self._memory.num_blocks:
            raise ConnectionError(f"asked for block {max(block_ids)} of {self._memory.num_blocks}")
        return block_ids


@asynccontextmanager
async def serve_pool(
    memory: BlockMemory, host: str, guard: ReadGuard, tls: OwnerTls | None = None
) -> AsyncIterator[PoolServer]:
    """Serves what the guard allows of `memory` on a free port of `host` while the context is open."""
    server = PoolServer(memory, host, guard, tls)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.close)


def _receive_ids(connection: socket.socket, count: int, deadline: float) -> list[int]:
    ids = array.array("I", receive_before(connection, count * 4, deadline))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
