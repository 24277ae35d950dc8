"""A TCP connection between two nodes: delay, segments, flow control, and what may go wrong with it."""

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any

from simulation.entropy import Time
from simulation.loop import Node

if TYPE_CHECKING:
    from simulation.network import Network

_MOST = 65536
_MOST_SLOW = 4096
_LOST_SECONDS = 0.2  # until a segment is sent again
_NOBODY = Context()

_LATE_SECONDS = 0.1


class Pair:
    """Both ends of a connection."""

    def __init__(
        self, network: "Network", number: int, ours: tuple[Node, Context], theirs: tuple[Node, Context]
    ) -> None:
        self.network, self.number = network, number
        self.nodes = (ours[0], theirs[0])
        self.name = f"c{number}:{ours[0].name}>{theirs[0].name}"
        one, other = Connection(self, *ours, "a"), Connection(self, *theirs, "b")
        one.peer, other.peer = other, one
        self.ends = (one, other)

    @property
    def active_at(self) -> float:
        """The time of the last write to it."""
        return max(end._last_at for end in self.ends)

    def name_ends(self, ours: tuple[str, int], theirs: tuple[str, int]) -> None:
        """The addresses that its ends tell."""
        self.ends[0].names = {"peername": theirs, "sockname": ours}
        self.ends[1].names = {"peername": ours, "sockname": theirs}

    def reset(self) -> None:
        """Both ends are told that it is over."""
        for end in self.ends:
            end.lose(ConnectionResetError(104, "Connection reset by peer"))

    def freeze(self, *, one_way: bool) -> None:
        """Half-open: nothing arrives any more, and nobody is told."""
        self.ends[0].black_hole = True
        self.ends[1].black_hole = self.ends[1].black_hole or not one_way

    def slow(self, rate: int) -> None:
        """Bytes a second; 0 is as fast as usual."""
        for end in self.ends:
            end.rate = rate

    def lose_host(self, node: Node, *, silently: bool) -> None:
        """A process at one end is gone."""
        for end in self.ends:
            if end.node is not node:
                continue
            end.closed = end.black_hole = True
            if silently:
                end.peer.black_hole = True
            else:
                end.peer.reset_soon()

    def meet_restarted(self, node: Node) -> None:
        """The host at one end has another process now, which knows nothing of it."""
        for end in self.ends:
            if end.node.ip == node.ip and end.node is not node and end.node.dead:
                end.peer.reset_soon()

    def forget(self) -> None:
        """It is over for both."""
        if all(end.closed for end in self.ends):
            self.network.pairs.pop(self.number, None)


class Connection(asyncio.Transport):
    """One end. What it writes waits until it is delivered; of that the sockets hold a part, and the rest is unread."""

    peer: "Connection"

    def __init__(self, pair: Pair, node: Node, context: Context, side: str) -> None:
        super().__init__()
        self.pair, self.node, self.context = pair, node, context
        self.network, self.loop = pair.network, pair.network.loop
        self.name = f"{pair.name}/{side}"
        self.names: dict[str, Any] = {}
        self.protocol: Any = None
        self.closing = self.closed = self.black_hole = False
        self.rate = 0
        self._queue: list[bytes] = []
        self._queued = 0
        self.arriving = 0  # pieces that have come, and whose turn has not
        self.set_write_buffer_limits()
        self._writer_paused = self._reader_paused = self._is_moving = self._ended = False
        self._last_at = 0.0

    def begin(self, protocol: Any) -> Any:
        """Gives it a protocol."""
        self.protocol = protocol
        protocol.connection_made(self)
        if self.closed:
            self.loop.call_soon(self._lost, ConnectionResetError(104, "Connection reset by peer"), context=self.context)
        self.peer._pump()
        return protocol

    # What a protocol calls.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.names.get(name, default)

    def is_closing(self) -> bool:
        return self.closing or self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = min(64 * 1024 if high is None else high, self.network.socket_bytes)
        self._low = self._high // 4 if low is None else min(low, self._high)

    def get_write_buffer_size(self) -> int:
        return max(0, self._queued - self.network.socket_bytes)

    def write(self, data: Any) -> None:
        if self.is_closing() or not data:
            return
        self._queue.append(bytes(data))
        self._queued += len(data)
        if not self._writer_paused and self.get_write_buffer_size() > self._high:
            self._writer_paused = True
            self.protocol.pause_writing()
        self._pump()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        self._reader_paused = True

    def resume_reading(self) -> None:
        self._reader_paused = False
        self.peer._pump()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self._pump()

    def abort(self) -> None:
        if not self.closed:
            self.lose(None)
            self.peer.reset_soon()

    @property
    def is_empty(self) -> bool:
        """True if nothing that was written is still on its way to the peer."""
        return not (self._queue or self.peer.arriving)

    @property
    def is_late(self) -> bool:
        """True if bytes are on their way since the connection was slow."""
        return self._is_moving and self._last_at > Time.now + _LATE_SECONDS

    # How bytes move.

    def _pump(self) -> None:
        if self._is_moving or self.closed or not (self._queue or self.closing):
            return
        self._is_moving = True
        seconds = self.network.delay() + (min(self._queued, _MOST_SLOW) / self.rate if self.rate else 0.0)
        self._last_at = max(self._last_at, Time.now + seconds)
        self.loop.call_at(self._last_at, self._move, context=_NOBODY)

    def _move(self) -> None:
        """Carries what was written to the peer; runs for the network, not for a node."""
        self._is_moving = False
        peer = self.peer
        if self.closed or self.black_hole:
            return
        if self.network.is_cut(self.node, peer.node):
            self._is_moving = True
            self.loop.call_at(Time.now + _LOST_SECONDS, self._move, context=_NOBODY)
            return
        if peer.protocol is None or peer._reader_paused:
            return
        if self._queue:
            self._deliver(peer)
        if self._queue:
            self._pump()
        elif self.closing:
            self.lose(None)
            self.loop.call_soon(peer._receive_end, context=peer.context)

    def _deliver(self, peer: "Connection") -> None:
        written = b"".join(self._queue)
        most, draw = _MOST_SLOW if self.rate else _MOST, self.network.random
        if len(written) > 1 and draw.random() < 0.05:
            most = min(most, draw.randrange(1, len(written)))
        piece, rest = written[:most], written[most:]
        self._queue, self._queued = [rest] if rest else [], len(rest)
        # Its size: the order of a protobuf map, which changes no size, is that of the process's addresses.
        self.network.log("data", self.name, len(piece))
        peer.arriving += 1
        self.loop.call_soon(peer._receive, piece, context=peer.context)
        if self._writer_paused and self.get_write_buffer_size() <= self._low:
            self._writer_paused = False
            self.loop.call_soon(self.protocol.resume_writing, context=self.context)

    def _receive(self, piece: bytes) -> None:
        self.arriving -= 1
        if not self.closed and not self._ended:
            self.protocol.data_received(piece)

    def _receive_end(self) -> None:
        if not self.is_closing():
            self.protocol.eof_received()
        self.lose(None)

    # Its end.

    def reset_soon(self) -> None:
        """A reset is on its way here."""
        if not self.closed:
            error = ConnectionResetError(104, "Connection reset by peer")
            self.loop.call_at(Time.now + self.network.delay(), self.lose, error, context=_NOBODY)

    def lose(self, error: Exception | None) -> None:
        """It is over at this end."""
        if self.closed:
            return
        self.closed = self.closing = True
        self._queue.clear()
        self._queued = 0
        self.pair.forget()
        if self.protocol is not None:
            self.network.log("lost", self.name, type(error).__name__)
            self.loop.call_soon(self._lost, error, context=self.context)

    def _lost(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            # As asyncio's transports: a timer that would cut it keeps nothing of its protocol.
            protocol, self.protocol = self.protocol, None
            protocol.connection_lost(error)
