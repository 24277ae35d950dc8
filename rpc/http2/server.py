"""A gRPC server on HTTP/2 of our own: its methods, its sockets, its connections, and its end."""

import asyncio
import contextvars
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from grpc import aio

from rpc.auth.tls import TlsConfig
from rpc.http2.call import Call, CallDetails, Refusal, Refuse
from rpc.http2.connection import Connection
from rpc.http2.limits import EXCEEDED, ServerLimits, exceeded
from rpc.http2.security import server_context
from rpc.http2.stream import Stream
from rpc.http2.wire.frames import ENHANCE_YOUR_CALM, PROTOCOL_ERROR, ConnectionFailure, goaway, settings
from rpc.http2.wire.request import RequestHead
from rpc.input_budget import InputBudget, InputLimits
from rpc.turns import CallTurns
from runtime.aio import timeout
from runtime.network.accepting import Acceptor
from runtime.network.descriptors import OpenConnections
from runtime.network.listening import open_sockets

Find = Callable[[CallDetails], Awaitable[Any]]

# Left to everything but clients, where a server is on its own.
RESERVED_DESCRIPTORS: Final = 256
# How long closed connections may take to be gone.
_CLOSE_SECONDS: Final = 2.0


def _refuse_connection(accepted: socket.socket) -> None:
    """Says why a connection may not stay."""
    EXCEEDED.labels("connections").inc()
    with suppress(OSError):
        accepted.send(settings({}) + goaway(0, ENHANCE_YOUR_CALM, "too many connections"))


class Http2Server:
    """Serves handlers as `grpc.aio.server` does, and takes what generated code and interceptors give to that one.

    `context` holds the context variables that each call starts with: those of the code that creates the server.
    `refuse` decides at a call's headers, before its message is received; `input` and `open_connections` may be those of
    several servers.
    """

    def __init__(
        self,
        interceptors: Sequence["aio.ServerInterceptor[Any, Any]"],
        limits: ServerLimits,
        *,
        refuse: Refuse | None = None,
        input: InputBudget | None = None,
        open_connections: OpenConnections | None = None,
    ) -> None:
        self.limits = limits
        self.open_connections = open_connections or OpenConnections(RESERVED_DESCRIPTORS)
        self.input = input or InputBudget(limits.input or InputLimits())
        self.inflating = asyncio.Lock()
        self.refuse = refuse
        self.context = contextvars.copy_context()
        self.turns = CallTurns()
        self._methods: dict[str, Any] = {}
        self._generic: list[Any] = []
        find: Find = self._look_up
        for interceptor in reversed(interceptors):
            find = partial(interceptor.intercept_service, find)
        self._find = find
        self._sockets: list[socket.socket] = []
        self._ssl: ssl.SSLContext | None = None
        self._acceptor: Acceptor | None = None
        self._connections: set[Connection] = set()
        self._by_peer: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # What generated code calls.

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Handlers that are asked for each method that is not registered."""
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """The handlers of a service, by the names of its methods."""
        self._methods.update({f"/{service_name}/{name}": handler for name, handler in method_handlers.items()})

    # Its life.

    def bind(self, listen: str, tls: TlsConfig | None, *, shares_port: bool = False) -> int:
        """Takes the port of `host:port`, where 0 is any free one. Raises OSError, and ConfigError for the files of TLS.

        With `shares_port` other processes may take the same one, and share its connections.
        """
        self._ssl = None if tls is None else server_context(tls)
        host, _, port = listen.rpartition(":")
        self._sockets = open_sockets(host.strip("[]"), int(port), shares_port=shares_port)
        return int(self._sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Takes connections from now on."""
        self._acceptor = Acceptor(
            self._sockets,
            lambda: Connection(self),
            self.open_connections,
            _refuse_connection,
            tls=self._ssl,
            handshake_seconds=self.limits.http2.handshake_seconds,
        )

    async def stop(self, grace_seconds: float | None) -> None:
        """Takes no more connections and calls; what runs goes on for so long, and is cancelled then.

        It may be called again, with less patience.
        """
        if self._acceptor is not None:
            self._acceptor.close()
        for each in self._sockets:
            each.close()
        for connection in tuple(self._connections):
            connection.liveness.drain()
        if grace_seconds:
            await self._wait_until(lambda: not self._is_busy, grace_seconds)
        for connection in tuple(self._connections):
            connection.close("the server stops")
        await self._wait_until(lambda: not self._connections, _CLOSE_SECONDS)
        if self._acceptor is not None:
            await self._acceptor.wait_closed()

    @property
    def _is_busy(self) -> bool:
        return bool(self._tasks) or any(connection.streams for connection in self._connections)

    async def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        try:
            async with timeout(seconds):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    # What connections and calls ask.

    def add(self, connection: Connection) -> None:
        """A connection is there. Raises ConnectionFailure if it may not stay."""
        self._connections.add(connection)
        self.open_connections.add(connection)
        self._by_peer[connection.peer_host] += 1
        if self._by_peer[connection.peer_host] > self.limits.http2.max_connections_per_peer:
            raise exceeded("connections", "too many connections of one peer")
        secured = connection.transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            raise ConnectionFailure(PROTOCOL_ERROR, "ALPN did not choose h2")

    def discard(self, connection: Connection) -> None:
        """It is not any more."""
        self._connections.discard(connection)
        self.open_connections.discard(connection)
        self._by_peer[connection.peer_host] -= 1
        if not self._by_peer[connection.peer_host]:
            del self._by_peer[connection.peer_host]
        self._changed.set()

    def note_idle(self) -> None:
        """No call runs on some connection any more."""
        self._changed.set()

    def answer(self, connection: Connection, stream: Stream, head: RequestHead | None) -> Call | Refusal:
        """Makes the call of a new stream."""
        if head is None or head.http_status:
            return Refusal(stream, head)
        return Call(self, connection, stream, head)

    def takes_one_message(self, path: str) -> bool:
        """Whether the method's request is known to be a single message."""
        handler = self._methods.get(path)
        return handler is not None and not handler.request_streaming

    async def find(self, details: CallDetails) -> Any:
        """The handler of a call, as the interceptors give it; None for an unknown method."""
        return await self._find(details)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs a call in a task of its own, with fresh context variables, until the call says `ended`."""
        task = self.context.copy().run(asyncio.get_running_loop().create_task, work)
        self._tasks.add(task)
        return task

    def ended(self, task: "asyncio.Task[None]") -> None:
        """The task of a call is done."""
        self._tasks.discard(task)
        if not self._tasks:
            self._changed.set()

    async def _look_up(self, details: CallDetails) -> Any:
        handler = self._methods.get(details.method)
        if handler is not None:
            return handler
        found = (generic.service(details) for generic in self._generic)
        return next((handler for handler in found if handler is not None), None)
