"""A gRPC server on HTTP/2 of our own: its methods, its sockets, its connections, and its end."""

import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from grpc import aio

from baton_http2.aio import timeout
from baton_http2.input_budget import InputBudget, InputLimits
from baton_http2.limits import EXCEEDED, ServerLimits
from baton_http2.output_budget import OutputBudget
from baton_http2.security import require_http2
from baton_http2.server.calls import Calls
from baton_http2.server.connection import Connection, Connections
from baton_http2.server.methods import Refuse
from baton_http2.sockets.accepting import Acceptor, open_sockets
from baton_http2.sockets.descriptors import OpenConnections
from baton_http2.wire.frames import ENHANCE_YOUR_CALM, goaway, settings

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

    Each call starts with the context variables of the code that creates the server.
    `refuse` decides at a call's headers, before its message is received; `input`, `output` and `open_connections` may
    be those of several servers.
    """

    def __init__(
        self,
        interceptors: Sequence["aio.ServerInterceptor[Any, Any]"],
        limits: ServerLimits,
        *,
        refuse: Refuse | None = None,
        input: InputBudget | None = None,
        output: OutputBudget | None = None,
        open_connections: OpenConnections | None = None,
    ) -> None:
        self.calls = Calls(interceptors, refuse)
        self._open_connections = open_connections or OpenConnections(RESERVED_DESCRIPTORS)
        budget = input or InputBudget(limits.input or InputLimits())
        unread = output or OutputBudget(limits.unread_output_bytes)
        self.connections = Connections(limits, self.calls, budget, unread, self._open_connections)
        self._handshake_seconds = limits.http2.handshake_seconds
        self._sockets: list[socket.socket] = []
        self._ssl: ssl.SSLContext | None = None
        self._acceptor: Acceptor | None = None

    # What generated code calls.

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Handlers that are asked for each method that is not registered."""
        self.calls.add_generic(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """The handlers of a service, by the names of its methods."""
        self.calls.add_methods(service_name, method_handlers)

    # Its life.

    def bind(self, listen: str, tls: ssl.SSLContext | None = None, *, shares_port: bool = False) -> int:
        """Takes the port of `host:port`, where 0 is any free one. Raises OSError.

        With `shares_port` other processes may take the same one, and share its connections.
        """
        host, _, port = listen.rpartition(":")
        return self.use(open_sockets(host.strip("[]"), int(port), shares_port=shares_port), tls)

    def use(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None) -> int:
        """Takes sockets that are bound to one port, which it returns, and closes them at its end."""
        self._ssl = None if tls is None else require_http2(tls)
        self._sockets = list(sockets)
        return int(self._sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Takes connections from now on."""
        self._acceptor = Acceptor(
            self._sockets,
            lambda: Connection(self.connections),
            self._open_connections,
            _refuse_connection,
            tls=self._ssl,
            handshake_seconds=self._handshake_seconds,
        )

    async def stop(self, grace_seconds: float | None) -> None:
        """Takes no more connections and calls; what runs goes on for so long, and is cancelled then.

        It may be called again, with less patience.
        """
        if self._acceptor is not None:
            self._acceptor.close()
            await self._acceptor.wait_closed()
        for each in self._sockets:
            each.close()
        for connection in tuple(self.connections.open):
            connection.liveness.drain()
        if grace_seconds:
            await self._wait_until(lambda: not self._is_busy, grace_seconds)
        for connection in tuple(self.connections.open):
            connection.close("the server stops")
        await self._wait_until(lambda: not self.connections.open, _CLOSE_SECONDS)

    @property
    def _is_busy(self) -> bool:
        return bool(self.calls.tasks) or any(connection.streams for connection in self.connections.open)

    async def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        try:
            async with timeout(seconds):
                while not condition():
                    self.calls.changed.clear()
                    await self.calls.changed.wait()
        except TimeoutError:
            return
