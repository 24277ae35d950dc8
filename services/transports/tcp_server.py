"""The owner's side of the tcp transport: sends blocks to whoever has the token, a thread a connection."""

import array
import asyncio
import hmac
import secrets
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import structlog
from baton.engine.v1 import handoff_pb2

from services.kv import BlockMemory
from services.transports.frames import COUNT, MAGIC, TOKEN_BYTES, limit_waits, receive_exactly, send_all, shut
from services.transports.secure import OwnerTls

log = structlog.get_logger(__name__)

_HELLO_SECONDS = 5.0
# Between two requests; readers keep their connections, and notice when one was closed.
_IDLE_SECONDS = 300.0
_STUCK_SECONDS = 30.0
_MAX_CONNECTIONS = 256
_READ_BYTES = 64 * 1024 * 1024


class PoolServer:
    """A pool, offered at a port. Its threads never touch the event loop."""

    def __init__(self, memory: BlockMemory, host: str, tls: OwnerTls | None = None) -> None:
        self._tls = tls
        self._memory = memory
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=64)
        self._port = int(self._listener.getsockname()[1])
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._accepting.start()

    def endpoint(self, host: str) -> handoff_pb2.TransportEndpoint:
        """How readers get here, by the name under which they know this host."""
        tcp = handoff_pb2.TcpEndpoint(host=host, port=self._port, token=self._token)
        return handoff_pb2.TransportEndpoint(tcp=tcp)

    def close(self) -> None:
        """Ends every connection and waits for its thread. Blocking."""
        shut(self._listener)
        self._accepting.join()
        with self._lock:
            threads = list(self._connections.values())
            for connection in self._connections:
                shut(connection)
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="kv-send", daemon=True)
            with self._lock:
                if len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        if self._tls is not None:
            connection = self._secure(connection, self._tls)
        try:
            self._answer_all(connection)
        except OSError as error:
            log.debug("a reader's connection ended", error=str(error))
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _secure(self, connection: socket.socket, tls: OwnerTls) -> ssl.SSLSocket:
        """The socket takes the plain one's place, which is none any more."""
        with self._lock:
            secure = tls.wrap(connection)
            self._connections[secure] = self._connections.pop(connection)
        return secure

    def _answer_all(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_waits(connection, _HELLO_SECONDS)
        if self._tls is not None and isinstance(connection, ssl.SSLSocket):
            self._tls.shake_hands(connection)
        hello = receive_exactly(connection, len(MAGIC) + TOKEN_BYTES)
        if not hmac.compare_digest(hello, MAGIC + self._token):
            raise ConnectionError("no token of ours")
        while True:
            limit_waits(connection, _IDLE_SECONDS)
            (count,) = COUNT.unpack(receive_exactly(connection, COUNT.size))
            limit_waits(connection, _STUCK_SECONDS)
            block_ids = self._checked(_receive_ids(connection, self._limited(count)))
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
async def serve_pool(memory: BlockMemory, host: str, tls: OwnerTls | None = None) -> AsyncIterator[PoolServer]:
    """Offers `memory` on a free port of `host` while the context is open."""
    server = PoolServer(memory, host, tls)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.close)


def _receive_ids(connection: socket.socket, count: int) -> list[int]:
    ids = array.array("I", receive_exactly(connection, count * 4))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
