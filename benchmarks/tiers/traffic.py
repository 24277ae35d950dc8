"""Agents in a closed loop, and a trace in an open one."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from benchmarks.routing.simulated.clock import Time
from benchmarks.tiers.cluster import Cluster
from devtools.bench.agents import AgentSession, AgentSessions
from devtools.bench.traces import TracedRequest

_TOKEN_SECONDS = 0.007
# A session whose client never says that it ends counts as ended after so much silence.
_SILENCE_SECONDS = 600.0


class Agents:
    """So many sessions of agents and chats at a time; a new one begins when one ends."""

    def __init__(self, time: Time, seed: int, sessions: int, chats: int, until: float) -> None:
        self._time, self._until = time, until
        self._source = random.Random(seed)
        self._made = AgentSessions(seed)
        self._live: dict[str, int] = {}
        self.live_blocks: list[int] = []
        for make, number in ((self._made.main, sessions), (self._made.chat, chats)):
            for _ in range(number):
                time.later(self._source.random() * 60, lambda make=make: self._begin(make, in_mid_life=True))
        time.later(100.0, self._sample)

    cluster: Cluster

    def _begin(self, make: Callable[..., AgentSession], *, in_mid_life: bool = False) -> None:
        if self._time.now > self._until:
            return

        def ended() -> None:
            self._time.later(self._source.expovariate(1 / 10), lambda: self._begin(make))

        self._turn(make(in_mid_life=in_mid_life), 0, ended)

    def _turn(self, session: AgentSession, number: int, ended: Callable[[], None]) -> None:
        if self._time.now > self._until:
            return
        turn = session.turns[number]
        self._live[session.key] = len(turn.blocks)

        def answered() -> None:
            if number + 1 == len(session.turns):
                self._end(session)
                ended()
                return
            waiting = len(turn.subagents)

            def next_turn() -> None:
                self._turn(session, number + 1, ended)

            def subagent_ended() -> None:
                nonlocal waiting
                waiting -= 1
                if not waiting:
                    next_turn()

            for each in turn.subagents:
                self._turn(each, 0, subagent_ended)
            if not turn.subagents:
                self.cluster.returns.returns(session.key, self._time.now + turn.pause_seconds)
                self._time.later(turn.pause_seconds, next_turn)

        self.cluster.submit(
            session.key, turn.blocks, answered, follows=number > 0, output=turn.output_tokens * _TOKEN_SECONDS
        )

    def _end(self, session: AgentSession) -> None:
        self._live.pop(session.key)
        self.cluster.returns.ended(session.key)
        wait = 0.0 if session.says_end else _SILENCE_SECONDS
        self._time.later(wait, lambda: self.cluster.end(session.key))

    def _sample(self) -> None:
        self.live_blocks.append(sum(self._live.values()))
        if self._time.now < self._until:
            self._time.later(50.0, self._sample)


class Replay:
    """The requests of a trace, so many times as fast. One follows others if its session has an earlier one, or if it
    shares two blocks with one. Those with a delay wait for the answer before.
    """

    cluster: Cluster

    def __init__(self, time: Time, trace: Sequence[TracedRequest], speedup: float) -> None:
        self._time, self._trace, self._speedup = time, trace, speedup
        self._next = _next_of_sessions(trace)
        self._seen: set[int] = set()
        self._sessions: set[str] = set()
        for number, request in enumerate(trace):
            if request.delay_seconds is None:
                time.later(request.at_seconds / speedup, partial(self._send, number))

    @property
    def live_blocks(self) -> int:
        """The median, over the trace's changes, of the blocks between their first and their last use; 0 if none is
        used twice.
        """
        uses: dict[int, tuple[float, float]] = {}
        for request in self._trace:
            at = request.at_seconds / self._speedup
            for block in request.hash_ids:
                uses[block] = uses.get(block, (at, at))[0], at
        changes = [change for first, last in uses.values() if last > first for change in ((first, 1), (last, -1))]
        levels = sorted(accumulate(change for _, change in sorted(changes)))
        return levels[len(levels) // 2] if levels else 0

    def _send(self, number: int) -> None:
        request = self._trace[number]
        shares = len(request.hash_ids) > 1 and request.hash_ids[1] in self._seen
        follows = shares or request.session_id in self._sessions
        self._seen.update(request.hash_ids)
        if request.session_id:
            self._sessions.add(request.session_id)
        output = request.output_tokens * _TOKEN_SECONDS
        answered = partial(self._answered, number)
        self.cluster.submit(request.session_id, request.hash_ids, answered, follows=follows, output=output)

    def _answered(self, number: int) -> None:
        request, following = self._trace[number], self._next.get(number)
        if following is not None:
            later = self._trace[following]
            at = later.at_seconds / self._speedup
            if later.delay_seconds is not None:
                at = self._time.now + later.delay_seconds / self._speedup
                self._time.later(at - self._time.now, partial(self._send, following))
            self.cluster.returns.returns(request.session_id, at)
        elif request.session_id:
            self.cluster.returns.ended(request.session_id)
            if request.ends_session:
                self.cluster.end(request.session_id)


def _next_of_sessions(trace: Sequence[TracedRequest]) -> dict[int, int]:
    """The number of the next request of the same session, for each request that has one."""
    following: dict[int, int] = {}
    latest: dict[str, int] = {}
    for number, request in enumerate(trace):
        if request.session_id in latest:
            following[latest[request.session_id]] = number
        if request.session_id:
            latest[request.session_id] = number
    return following
