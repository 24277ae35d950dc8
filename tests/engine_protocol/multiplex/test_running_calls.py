"""Responses for the calls of one stream: the tokens of a step, by the connections that they leave on."""

import pytest
from support.running_calls import Calls


async def test_tokens_are_noted_once_all_are_pushed() -> None:
    calls = Calls()
    calls.add(1, calls.a)
    calls.add(2, calls.b)
    calls.push((1, 10), (2, 20))
    assert sorted(each for each in calls.happened if isinstance(each, tuple)) == [(1, 10), (2, 20)]
    assert calls.happened[-2:] == ["noted", "noted"]


async def test_the_tokens_of_a_call_keep_their_order() -> None:
    calls = Calls()
    calls.add(1, calls.a)
    calls.add(2, calls.b)
    calls.push((1, 10), (2, 20), (1, 11), (2, 21))
    assert [each for each in calls.happened if isinstance(each, tuple)] == [(1, 10), (1, 11), (2, 20), (2, 21)]


async def test_a_sink_that_fails_ends_its_call_and_no_other() -> None:
    calls = Calls()
    failing = calls.add(1, calls.a, ValueError("wrong"))
    calls.add(2, calls.a)
    calls.push((1, 10), (2, 20))
    assert calls.happened == [(2, 20), "a", "noted"]
    with pytest.raises(ValueError, match="wrong"):
        await anext(failing)


async def test_a_sink_that_is_taken_away_by_its_own_token_is_settled() -> None:
    calls = Calls()
    sink = calls.add_stopping(1)
    calls.push((1, 10))
    assert sink.noted == 1


async def test_tokens_without_a_known_output_are_pushed_too() -> None:
    calls = Calls()
    calls.add(1, None)
    calls.push((1, 10))
    assert calls.happened == [(1, 10), "noted"]
