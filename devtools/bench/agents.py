"""Sessions of agents and chats, as coding agents have them: long prompts that grow turn by turn, tools, subagents.

A main session has 43 turns in the median and ends with a prompt of 142,000 tokens; 44 % of them start one to three
subagents at a time, for which they wait. Between two turns a tool runs: 45 % read (0.4 s), 25 % edit (1.5 s), 18 % test
(20 s), 5 % build (60 s), and 7 % wait for the user (300 s). Prompts are blocks of 512 tokens, equal where all tokens up
to there are equal.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from devtools.bench.traces import BLOCK_TOKENS, TOKEN_SECONDS, TracedRequest

# Of tools: their share, the median of their seconds, and the deviation of its logarithm.
_TOOLS = ((0.45, 0.4, 0.6), (0.25, 1.5, 0.8), (0.18, 20.0, 1.0), (0.05, 60.0, 1.2), (0.07, 300.0, 1.2))
_TEST = _TOOLS[2]
# Blocks of the tool sets of four agents, and of the system prompts of four chats.
_AGENT_SYSTEMS, _CHAT_SYSTEMS = (24, 30, 18, 40), (4, 6, 3, 8)
_MOST_BLOCKS = 380
# Of clients, those that say when a session is over.
_SAY_END = 0.9


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session. The next one comes `pause_seconds` after its answer, and after its subagents' ends."""

    blocks: tuple[int, ...]
    output_tokens: int
    pause_seconds: float
    subagents: "tuple[AgentSession, ...]" = ()


@dataclass(frozen=True, slots=True)
class AgentSession:
    """The turns of a session, of which the first `shared_blocks` of each prompt are those of other sessions, too."""

    key: str
    turns: tuple[Turn, ...]
    shared_blocks: int
    says_end: bool


class AgentSessions:
    """Makes sessions. Equal seeds make equal ones."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)
        self._numbers = count()
        self._keys = count(1)
        self._agents = [self._new(blocks) for blocks in _AGENT_SYSTEMS]
        self._chats = [self._new(blocks) for blocks in _CHAT_SYSTEMS]

    def main(self, *, in_mid_life: bool = False) -> AgentSession:
        """An agent's session; in mid-life it has some of its turns behind it."""
        source = self._source
        turns, top = max(3, self._around(43, 0.5)), source.lognormvariate(math.log(142_000), 0.35)
        subagents = 1 + int(source.expovariate(0.5)) if source.random() < 0.44 else 0
        starts = {source.randrange(1, turns) for _ in range(subagents)}
        return self._session(_popular(source, self._agents), turns, top, starts, in_mid_life=in_mid_life)

    def chat(self, *, in_mid_life: bool = False) -> AgentSession:
        """A chat of two to ten turns."""
        source = self._source
        turns, top = source.randrange(2, 11), source.lognormvariate(math.log(6000), 0.6)
        return self._session(_popular(source, self._chats), turns, top, set(), in_mid_life=in_mid_life, is_chat=True)

    def _subagent(self) -> AgentSession:
        source = self._source
        turns, top = max(2, self._around(12, 0.5)), source.lognormvariate(math.log(40_000), 0.4)
        return self._session(source.choice(self._agents), turns, top, set(), is_subagent=True)

    def _session(
        self,
        system: list[int],
        turns: int,
        top_tokens: float,
        starts: set[int],
        *,
        in_mid_life: bool = False,
        is_chat: bool = False,
        is_subagent: bool = False,
    ) -> AgentSession:
        source, made = self._source, list[Turn]()
        growth = max(1, int((top_tokens / BLOCK_TOKENS - len(system)) / turns))
        first = source.randrange(turns - 1) if in_mid_life else 0
        blocks = [*system, *self._new(growth * (1 + first))][:_MOST_BLOCKS]
        for turn in range(first + 1, turns + 1):
            subagents = tuple(self._subagent() for _ in range(source.randrange(1, 4))) if turn in starts else ()
            output = max(20, self._around(300 if is_chat else 444, 0.5))
            pause = 0.0 if subagents else self._pause(is_chat=is_chat, is_subagent=is_subagent)
            made.append(Turn(tuple(blocks), output, pause, subagents))
            blocks += self._new(max(1, int(source.expovariate(1 / growth) + 0.5)))
            if len(blocks) > _MOST_BLOCKS:
                break
        key = f"{'chat' if is_chat else 'agent'}-{next(self._keys)}"
        return AgentSession(key, tuple(made), len(system), source.random() < _SAY_END)

    def _pause(self, *, is_chat: bool, is_subagent: bool) -> float:
        if is_chat:
            return self._source.lognormvariate(math.log(40), 1.0)
        chosen = self._source.choices(_TOOLS, [share for share, _, _ in _TOOLS])[0]
        if is_subagent and chosen is _TOOLS[-1]:
            chosen = _TEST
        return self._source.lognormvariate(math.log(chosen[1]), chosen[2])

    def _around(self, median: float, deviation: float) -> int:
        return int(self._source.lognormvariate(math.log(median), deviation))

    def _new(self, blocks: int) -> list[int]:
        return [next(self._numbers) for _ in range(blocks)]


def trace_of_sessions(seed: int, requests: int, seconds: float) -> list[TracedRequest]:
    """A trace of agents and chats that begin within so many seconds, three chats to five agents. Answers are taken to
    need 20 ms a token, so that it can be sent without waiting for them.
    """
    sessions, source = AgentSessions(seed), random.Random(f"{seed}/times")
    found: list[TracedRequest] = []
    while len(found) < requests:
        session = sessions.chat() if source.random() < 3 / 8 else sessions.main()
        found += _requests(session, source.random() * seconds)
    return sorted(found[:requests], key=lambda request: request.at_seconds)


def _requests(session: AgentSession, at: float) -> Iterator[TracedRequest]:
    for turn in session.turns:
        yield TracedRequest(at, turn.blocks, len(turn.blocks) * BLOCK_TOKENS, turn.output_tokens)
        at += turn.output_tokens * TOKEN_SECONDS + turn.pause_seconds
        for each in turn.subagents:
            inside = list(_requests(each, at))
            yield from inside
            at = max(at, inside[-1].at_seconds)


def _popular(source: random.Random, systems: list[list[int]]) -> list[int]:
    return systems[min(len(systems) - 1, int(source.paretovariate(1)) - 1)]
