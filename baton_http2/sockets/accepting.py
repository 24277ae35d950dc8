"""Accepts connections as event loops do, but for what happens when there are no file descriptors left.

asyncio logs every failure, and uvloop closes the socket that listens. Here idle connections are closed, and accepting
goes on a moment later.

Sockets that listen: at every address of a host, at one port, which the processes of one server may share.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from baton_http2.sockets.descriptors import OpenConnections

log = structlog.get_logger(__name__)

_BACKLOG: Final = 1024
# Others have their turn of the event loop after so many.
_ACCEPTED_A_TURN: Final = 16
# After a failure, which is the lack of descriptors or of memory.
_PAUSE_SECONDS: Final = 0.1


class Acceptor:
    """Accepts the connections of sockets that are bound, until `close`.

    `refuse` may write to a connection that may not stay, before it is closed; it is not called with TLS.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        connections: OpenConnections,
        refuse: Callable[[socket.socket], None],
        *,
        tls: ssl.SSLContext | None = None,
        handshake_seconds: float = 10.0,
    ) -> None:
        self._sockets = sockets
        self._make_protocol = make_protocol
        self._connections = connections
        self._refuse = refuse
        self._tls = tls
        self._handshake_seconds = handshake_seconds if tls else None
        self._loop = asyncio.get_running_loop()
        self._starting: dict[_Starting, None] = {}
        self._is_closed = False
        for each in sockets:
            each.listen(_BACKLOG)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Accepts no more, and closes the sockets and what has not shaken hands yet."""
        if self._is_closed:
            return
        self._is_closed = True
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        if self._tls is None:
            # They are connections in the next turn. uvloop closes one that is cancelled then, and tells no protocol.
            return
        for starting in tuple(self._starting):
            starting.close_idle()

    async def wait_closed(self) -> None:
        """Returns when what was not a connection yet is one or is gone."""
        tasks = [starting.task for starting in self._starting]
        if tasks:
            await asyncio.wait(tasks)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_A_TURN):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(listening, error)
                return
            accepted.setblocking(False)
            descriptor = accepted.fileno()
            if self._connections.has_capacity(descriptor):
                self._start(accepted)
            else:
                with accepted:
                    if self._tls is None:
                        self._refuse(accepted)
            if descriptor >= self._connections.most:
                # What is closed for others is closed in the next turn.
                return

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        log.warning("connections cannot be accepted", error=str(error))
        self._connections.close_idle()
        self._loop.remove_reader(listening)
        self._loop.call_later(_PAUSE_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listening, self._accept, listening)

    def _start(self, accepted: socket.socket) -> None:
        task = self._loop.create_task(self._connect(accepted))
        starting = _Starting(task, self._loop.time())
        self._starting[starting] = None
        if self._tls is not None:
            # Silent peers must not keep others out for as long as a handshake may take.
            self._connections.add(starting)
        task.add_done_callback(lambda _: self._started(starting, accepted))

    def _started(self, starting: "_Starting", accepted: socket.socket) -> None:
        self._starting.pop(starting, None)
        self._connections.discard(starting)
        if starting.task.cancelled():
            accepted.close()

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, accepted, ssl=self._tls, ssl_handshake_timeout=self._handshake_seconds
            )
        except OSError as error:
            log.debug("a connection did not come about", error=str(error))
            accepted.close()


class _Starting:
    """A connection that is not one yet: its handshake for TLS goes on."""

    __slots__ = ("_since", "task")

    def __init__(self, task: "asyncio.Task[None]", since: float) -> None:
        self.task = task
        self._since = since

    def idle_since(self) -> float:
        """The loop's time at which it was accepted."""
        return self._since

    def close_idle(self) -> None:
        """Ends the handshake."""
        self.task.cancel()


def open_sockets(host: str, port: int, *, shares_port: bool = False) -> list[socket.socket]:
    """A bound socket for each address of the host, all at one port, where 0 is any free one. Raises OSError.

    With `shares_port` other processes of this user may bind the same one, and the kernel spreads the connections over
    those that listen.
    """
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host):
            # With the protocol: without it asyncio has small writes wait until earlier ones are acknowledged.
            each = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            sockets.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                # Of "::" the other family too, as gRPC has it.
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
            each.setblocking(False)
            each.bind((address, port))
            port = each.getsockname()[1]
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
