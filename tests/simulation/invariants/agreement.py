"""Both ends of what they share agree: on windows of flow control, on deadlines, and on the calls that run."""

import weakref
from collections.abc import Callable
from typing import Any

from baton_http2.client.connection import ClientConnection
from baton_http2.server.call import ServerCall
from baton_http2.server.connection import Connection as ServerConnection
from engine_protocol.multiplex import channel, service
from engine_protocol.multiplex.call import ServedCall
from rpc.metadata import REQUEST_KEY
from simulation.entropy import Time
from simulation.invariants.base import Invariant, running_at
from simulation.plan import CLIENTS, HTTP_APIS

# So many looks of invariants are left out.
_LOOKS = 5
_AGREE_SECONDS = 2.0
_LOST_SECONDS = 1.0
_ORPHAN_SECONDS = 0.3
# What keeps an end from a peer, and how long after it: until segments are sent again, or keepalive finds out. Of all
# other ends its kernel tells.
_HIDES = {"half": 30.0, "vanish": 30.0, "pause": 3.0, "cut": 5.0, "partition": 5.0, "slow": 5.0}
# Beside the way of a request from its client to a worker.
_DEADLINE_SECONDS = 0.5
# A deadline goes from process to process as the seconds that are left: what is on its way on a slow connection, or is
# sent again, makes it later, also after the fault: 4 KiB at 500 bytes a second.
_SLOW_SECONDS = 9.0


class WindowsAgree(Invariant):
    """A sender's window is as large as its receiver believes, on each connection and stream, whenever nothing is on its
    way between them: one that has got smaller for one of them never gets larger again.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._looks = 0
        self._differ: dict[tuple[str, int], tuple[int, float]] = {}

    def look(self) -> None:
        self._looks += 1
        if self._looks % _LOOKS:
            return
        before, self._differ = self._differ, {}
        for pair in self.world.network.pairs.values():
            if not self._is_moving(pair):
                continue
            for sender in pair.ends:
                if all(_is_still(end) for end in pair.ends):
                    self._compare(sender, before)
                else:
                    # In the middle of something: what differed before may still do so.
                    self._differ.update({key: value for key, value in before.items() if key[0] == sender.name})

    def _is_moving(self, pair: Any) -> bool:
        """True if what is sent arrives: no fault holds it, and nobody stands still."""
        ends = pair.ends
        still = any(
            end.node.dead or end.node.paused or end.black_hole or end.rate or end._reader_paused or end.is_late
            for end in ends
        )
        known = all(isinstance(end.protocol, (ClientConnection, ServerConnection)) for end in ends)
        return known and not (still or self.world.network.is_cut(*pair.nodes))

    def _compare(self, sender: Any, before: dict[tuple[str, int], tuple[int, float]]) -> None:
        ours, theirs = sender.protocol, sender.peer.protocol
        if ours.is_closing or theirs.is_closing:
            return
        self._note(sender.name, 0, ours.output.window - theirs.receiver._window, before)
        if sender.peer.node.name in CLIENTS:
            return  # of slow readers, who make their windows themselves
        for number, stream in ours.streams.items():
            other = theirs.streams.get(number)
            if other is not None and not (stream.closed or other.closed or other.half_closed):
                self._note(sender.name, number, stream.window - other.receive_window, before)

    def _note(self, name: str, stream: int, difference: int, before: dict[tuple[str, int], tuple[int, float]]) -> None:
        if not difference:
            return
        known, since = before.get((name, stream), (0, Time.now))
        if known != difference:
            since = Time.now
        if Time.now - since > _AGREE_SECONDS:
            self.problem(f"{name}, stream {stream}: the sender's window differs from its receiver's by {difference}")
            since = Time.now
        self._differ[name, stream] = (difference, since)


def _is_still(end: Any) -> bool:
    """True if all that this end has counted as sent has been counted by its peer."""
    return end.is_empty and not (end.protocol.output.frames or end.protocol.receiver._buffer)


class NothingWaitsForTheLost(Invariant):
    """A stream of calls that is lost has no calls a moment later, at neither end: each was told."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._streams: list[tuple[Any, weakref.ref[Any], Callable[[Any], int]]] = []
        self._since: dict[int, float] = {}

    def install(self) -> None:
        for kind, count in ((channel._Stream, _waiting), (service._Stream, _served)):
            self._watch(kind, count)

    def _watch(self, kind: Any, count: Callable[[Any], int]) -> None:
        begin, streams = kind.__init__, self._streams

        def beginning(stream: Any, *arguments: Any) -> None:
            begin(stream, *arguments)
            # Of no context: it outlives the request that it begins with.
            streams.append((self.world.loop.current, weakref.ref(stream), count))

        kind.__init__ = beginning

    def look(self) -> None:
        kept = []
        before, self._since = self._since, {}
        for node, reference, count in self._streams:
            stream = reference()
            if stream is None or node.dead:
                continue
            kept.append((node, reference, count))
            if not node.paused and count(stream):
                self._note(node, id(reference), count(stream), before)
        self._streams[:] = kept

    def _note(self, node: Any, key: int, calls: int, before: dict[int, float]) -> None:
        since = self._since[key] = before.get(key, Time.now)
        if Time.now - since > _LOST_SECONDS + 4 * self.world.plan.hiccup_seconds:
            self._since[key] = Time.now
            self.problem(f"{node.name}: {calls} calls go on though their stream is lost")


def _waiting(stream: Any) -> int:
    """The calls of a caller whose stream is lost."""
    return len(stream.calls._calls) if stream.is_lost else 0


def _served(stream: Any) -> int:
    """The calls of a server whose caller's stream is lost."""
    return len(stream._calls) + len(stream._tasks) if stream.stream.done() else 0


class CallsHaveCallers(Invariant):
    """A worker works for a request that its router still runs, and one decode of a request at a time: who was told of
    an end stops.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._since: dict[tuple[str, str, str], float] = {}

    def look(self) -> None:
        running = {name: {ctx.call_id for ctx in router.requests._running.values()} for name, router in self.routers()}
        before, self._since = self._since, {}
        decodes: dict[str, list[str]] = {}
        for name, worker in self.workers():
            for kind, call_id in running_at(worker):
                if kind == "decode":
                    decodes.setdefault(call_id, []).append(name)
                self._look_at(name, kind, call_id, running, before)
        for call_id, names in decodes.items():
            if len(names) > 1 and call_id not in self.world.steps.kept:
                self._note(("+".join(names), "decode", call_id), set(names), "more than one worker decodes", before)

    def _look_at(self, name: str, kind: str, call_id: str, running: Any, before: Any) -> None:
        steps = self.world.steps
        router = steps.routers.get(call_id)
        # What copies KV for a move is the mover's, and may end after its request.
        if router is None or call_id in steps.kept or kind == "warm":
            return
        current = self.world.nodes.get(router.name) is router and not router.dead
        if current and (router.name not in running or steps.first.get(call_id, call_id) in running[router.name]):
            return
        self._note((name, kind, call_id), {name, router.name}, "no router waits for", before)

    def _note(self, key: tuple[str, str, str], names: set[str], text: str, before: Any) -> None:
        since = self._since[key] = before.get(key, Time.now)
        if Time.now - since > _ORPHAN_SECONDS + 4 * self.world.plan.hiccup_seconds:
            self._since[key] = Time.now
            if not self._is_hidden(names):
                self.problem(f"{key[0]}: {text} {key[1]} of {key[2]} for {Time.now - since:.2f} s")

    def _is_hidden(self, names: set[str]) -> bool:
        """True if something keeps one of them from learning of what has ended."""
        return any(
            (one.ended is None or one.ended + _HIDES[one.fault.kind] >= Time.now) and one.touches(names)
            for one in self.world.chaos.happened
            if one.fault.kind in _HIDES
        )


class DeadlinesArePassedOn(Invariant):
    """A call of a request at a worker ends when its client's deadline is over: not later, and not sooner."""

    def install(self) -> None:
        serve, multiplexed = ServerCall.__init__, ServedCall.__init__

        def serving(call: Any, calls: Any, peer: Any, stream: Any, head: Any) -> None:
            serve(call, calls, peer, stream, head)
            self._check(head.path, head.metadata, call.deadline_at)

        def sharing(call: Any, owner: Any, start: Any) -> None:
            multiplexed(call, owner, start)
            self._check(start.method, call.invocation_metadata(), getattr(call, "_deadline_at", None))

        ServerCall.__init__ = serving  # type: ignore[method-assign]
        ServedCall.__init__ = sharing  # type: ignore[method-assign]

    def _check(self, path: str, metadata: Any, deadline_at: float | None) -> None:
        name = next((value for key, value in metadata or () if key == REQUEST_KEY), b"")
        client = self.world.running.get(name.decode()) if isinstance(name, bytes) and name else None
        if client is None or self.world.chaos.disturbed(client.result.started, None, _SLOW_SECONDS):
            return
        if client.result.asked.api in HTTP_APIS:
            return  # HTTP has no deadlines
        late = _DEADLINE_SECONDS + 4 * self.world.plan.hiccup_seconds
        if deadline_at is None:
            self.problem(f"{client.result.name}: {path} has no deadline")
        elif abs(deadline_at - client.ends_at) > late:
            self.problem(f"{client.result.name}: {path} ends {deadline_at - client.ends_at:+.2f} s after its client")
