"""Agents in a closed loop, and a trace in an open one."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

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
    """The requests of a trace, so many times as fast. A request follows another one if it shares two blocks with it."""

    cluster: Cluster

    def __init__(self, time: Time, trace: Sequence[TracedRequest], speedup: float) -> None:
        self._time = time
        self._uses: dict[int, list[float]] = defaultdict(list)
        for request in trace:
            at = request.at_seconds / speedup
            time.later(at, lambda request=request: self._send(request))
            for block in request.hash_ids:
                self._uses[block].append(at)
        self._seen: set[int] = set()

    @property
    def live_blocks(self) -> int:
        """The median, over the trace's changes, of the blocks between their first and their last use."""
        changes = []
        for uses in self._uses.values():
            if uses[-1] > uses[0]:
                changes += [(uses[0], 1), (uses[-1], -1)]
        live, levels = 0, []
        for _, change in sorted(changes):
            live += change
            levels.append(live)
        return sorted(levels)[len(levels) // 2]

    def _send(self, request: TracedRequest) -> None:
        follows = len(request.hash_ids) > 1 and request.hash_ids[1] in self._seen
        self._seen.update(request.hash_ids)
        output = request.output_tokens * _TOKEN_SECONDS
        self.cluster.submit("", request.hash_ids, lambda: None, follows=follows, output=output)
