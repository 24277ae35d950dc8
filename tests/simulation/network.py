"""A network in memory: hosts, sockets that listen, and what may go wrong between any two sets of them."""

import asyncio
import errno
import os
import random
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from typing import Any

from simulation.connection import Connection, Pair
from simulation.entropy import Time
from simulation.loop import Node, SimulatedLoop

Log = Callable[..., None]
_SYN_SECONDS, _BACKLOG_SECONDS = 1.0, 0.01
_FIRST_PORT = 40000


class ListeningSocket:
    """A socket that is bound, as the product's own acceptor uses it. Connections wait in its backlog."""

    def __init__(self, network: "Network", host: str, port: int, node: Node) -> None:
        self._network = network
        self.host, self.port, self.node = host, port, node
        self.waiting: list[Accepted] = []
        self._watch: tuple[Callable[[], None], Context] | None = None
        self.is_listening = False
        self.keeper: Node | None = None  # that holds it, too
        self._descriptor = -1

    @property
    def is_held(self) -> bool:
        """True if it is there without its process, and connections wait for the next one."""
        return self.keeper is not None and not self.keeper.dead

    def fileno(self) -> int:
        """A descriptor of nothing else, by which others may hold it."""
        if self._descriptor < 0:
            self._descriptor = os.memfd_create("listen")
        return self._descriptor

    def adopt_by(self, node: Node) -> None:
        """Another process has it from now on."""
        self.node, self._watch = node, None
        self._network.keep_socket(self)

    def getsockname(self) -> tuple[str, int]:
        return (self.host, self.port)

    def listen(self, backlog: int) -> None:
        self.is_listening = True

    def accept(self) -> "tuple[Accepted, tuple[str, int]]":
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.pop(0), (self.host, 0)

    def watch(self, callback: Callable[[], None] | None, context: Context | None) -> None:
        """Calls back when a connection waits."""
        self._watch = None if callback is None or context is None else (callback, context)
        if self.waiting:
            self._tell()

    def offer(self, end: Connection) -> None:
        """A peer has connected."""
        self.waiting.append(Accepted(end, len(self._network.pairs) + 16))
        self._tell()

    def close(self) -> None:
        self.is_listening = False
        self._network.forget_socket(self)
        for accepted in self.waiting:
            accepted.close()
        self.waiting.clear()

    def _tell(self) -> None:
        if self._watch is not None:
            callback, context = self._watch
            self._network.loop.call_soon(callback, context=context.copy())


class Accepted:
    """A socket that was accepted, and is not a transport yet."""

    def __init__(self, end: Connection, descriptor: int) -> None:
        self._end, self._descriptor = end, descriptor

    def setblocking(self, blocking: bool) -> None:
        """It never blocks."""

    def fileno(self) -> int:
        return self._descriptor

    def adopt(self, factory: Callable[[], Any]) -> tuple[Connection, Any]:
        """Makes it the transport of a protocol."""
        self._end.context = copy_context()
        return self._end, self._end.begin(factory())

    def send(self, data: bytes) -> int:
        self._end.write(data)
        return len(data)

    def close(self) -> None:
        self._end.abort()

    def __enter__(self) -> "Accepted":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Network:
    """Hosts by their address. `cut` has the pairs of node names that cannot talk."""

    def __init__(self, loop: SimulatedLoop, seed: int, log: Log) -> None:
        self.loop, self.log = loop, log
        self.random = random.Random(f"network-{seed}")
        self.sockets: dict[tuple[str, int], list[ListeningSocket]] = {}  # of several processes at one address
        self.pairs: dict[int, Pair] = {}
        self.nodes: dict[str, Node] = {}
        self.cut: set[tuple[str, str]] = set()
        self.gone: set[str] = set()  # hosts that do not even refuse
        self._base = self.random.choice((30e-6, 100e-6, 1e-3))
        self._rare = self.random.choice((0.0, 0.01, 0.05))
        self.socket_bytes = self.random.choice((1024, 128 * 1024))  # in flight, before what is written waits
        self._numbers, self._ports = 0, _FIRST_PORT

    def delay(self) -> float:
        """Of one segment: a little, and sometimes a retransmission."""
        drawn = self.random.random()
        if drawn < self._rare:
            return self._base + self.random.expovariate(1 / 8e-3)
        return self._base * (1.0 + 3.0 * self.random.random())

    def is_cut(self, one: Node, other: Node) -> bool:
        """True if nothing passes between two nodes."""
        return (one.name, other.name) in self.cut or (other.name, one.name) in self.cut

    # Listening and connecting.

    def bind(self, host: str, port: int, *, shares_port: bool = False) -> list[ListeningSocket]:
        """In the place of `open_sockets`: the address of the node that asks."""
        node = self.loop.current
        assert node is not None
        self._ports += not port
        port = port or self._ports
        if not shares_port and (host, port) in self.sockets:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        found = ListeningSocket(self, host, port, node)
        self.keep_socket(found)
        return [found]

    def keep_socket(self, socket: ListeningSocket) -> None:
        """It can be connected to."""
        known = self.sockets.setdefault((socket.host, socket.port), [])
        if socket not in known:
            known.append(socket)

    def forget_socket(self, socket: ListeningSocket) -> None:
        """It does not listen any more."""
        address = (socket.host, socket.port)
        left = [one for one in self.sockets.pop(address, ()) if one is not socket]
        if left:
            self.sockets[address] = left

    async def connect(self, factory: Callable[[], Any], host: str, port: int, node: Node) -> tuple[Connection, Any]:
        """A connection from `node`. Raises ConnectionRefusedError; hangs while the host cannot be reached."""
        await asyncio.sleep(self.delay() * 2)
        while self._is_out_of_reach(host, node):  # noqa: ASYNC110  # a packet is sent again
            await asyncio.sleep(_SYN_SECONDS)
        while any(one.is_held and one.node.dead for one in self.sockets.get((host, port), ())):  # noqa: ASYNC110  # its backlog
            await asyncio.sleep(_BACKLOG_SECONDS)
        listening = [one for one in self.sockets.get((host, port), ()) if one.is_listening and not one.node.dead]
        if not listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed ('{host}', {port})")
        found = self.random.choice(listening) if len(listening) > 1 else listening[0]
        self._numbers += 1
        self._ports += 1
        pair = self.pairs[self._numbers] = Pair(self, self._numbers, (node, copy_context()), (found.node, Context()))
        pair.name_ends((node.ip, self._ports), (host, port))
        self.log("connect", pair.name)
        ours, theirs = pair.ends
        found.offer(theirs)
        return ours, ours.begin(factory())

    def _is_out_of_reach(self, host: str, node: Node) -> bool:
        peer = self.nodes.get(host)
        return host in self.gone or (peer is not None and self.is_cut(node, peer))

    # What goes wrong.

    def between(self, one: Node, other: Node | None = None) -> list[Pair]:
        """The connections of a node, or of two."""
        return [
            pair
            for pair in self.pairs.values()
            if one in pair.nodes and (other is None or other is one or other in pair.nodes)
        ]

    def partition(self, names: Iterable[str], others: Iterable[str]) -> None:
        """Cuts each of `names` off from each of `others`."""
        kept = tuple(others)
        self.cut.update((one, other) for one in names for other in kept if one != other)

    def heal(self) -> None:
        """Ends all partitions."""
        self.cut.clear()

    def kill(self, node: Node, *, silently: bool) -> None:
        """All sockets of a process: its kernel resets them, or its host is gone and says nothing."""
        for found in [one for each in self.sockets.values() for one in each if one.node is node or one.node.dead]:
            if not found.is_held:
                self.forget_socket(found)
        if silently:
            self.gone.add(node.ip)
        for pair in self.between(node):
            pair.lose_host(node, silently=silently)

    def revive(self, node: Node) -> None:
        """The host is there again: it resets connections that it does not know."""
        self.gone.discard(node.ip)
        self.nodes[node.ip] = node
        for pair in list(self.pairs.values()):
            pair.meet_restarted(node)

    def describe(self, now: float = 0.0) -> str:
        """Its state in a word, for logs."""
        return f"{len(self.pairs)} connections at {now or Time.now:.3f}"
