"""Generated sessions of agents."""

import statistics

from devtools.bench.agents import AgentSession, AgentSessions, trace_of_sessions
from devtools.bench.traces import BLOCK_TOKENS, ideal_hit_rate


def test_sessions_have_the_turns_and_the_prompts_of_coding_agents() -> None:
    made = AgentSessions(1)
    sessions = [made.main() for _ in range(200)]
    assert 35 < statistics.median(len(session.turns) for session in sessions) < 50
    last = statistics.median(len(session.turns[-1].blocks) for session in sessions) * BLOCK_TOKENS
    assert 110_000 < last < 170_000
    with_subagents = sum(any(turn.subagents for turn in session.turns) for session in sessions)
    assert 0.3 < with_subagents / len(sessions) < 0.55


def test_a_turn_continues_the_one_before_it() -> None:
    for session in [AgentSessions(2).main(), AgentSessions(2).chat()]:
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert len(after.blocks) > len(before.blocks)


def test_sessions_share_their_first_blocks_alone() -> None:
    made = AgentSessions(3)
    one, other = made.main(), made.main()
    shared = set(one.turns[-1].blocks) & set(other.turns[-1].blocks)
    assert len(shared) in (0, one.shared_blocks)


def test_equal_seeds_make_equal_sessions() -> None:
    def some(seed: int) -> list[AgentSession]:
        made = AgentSessions(seed)
        return [made.main(in_mid_life=True), made.chat(), made.main()]

    assert some(5) == some(5)
    assert some(5) != some(6)


def test_a_trace_of_sessions_repeats_most_of_its_prompts() -> None:
    trace = trace_of_sessions(1, 1000, 60.0)
    assert len(trace) == 1000
    assert trace == trace_of_sessions(1, 1000, 60.0)
    assert [each.at_seconds for each in trace] == sorted(each.at_seconds for each in trace)
    assert ideal_hit_rate(trace) > 0.8
