"""A connection is written to once for the tokens of a step, for all of its calls."""

from support.running_calls import Calls, Sink


async def test_an_output_is_flushed_before_tokens_of_another_one_are_taken() -> None:
    calls = Calls()
    for number, output in ((1, calls.a), (2, calls.b), (3, calls.a)):
        calls.add(number, output)
    calls.push((1, 10), (2, 20), (3, 30))
    assert calls.happened[:5] == [(1, 10), (3, 30), "a", (2, 20), "b"]


async def test_a_call_that_gets_another_output_is_taken_with_its_neighbours_there() -> None:
    calls = Calls()
    for number, output in ((1, calls.a), (2, calls.b), (3, calls.a)):
        calls.add(number, output)
    calls.push((1, 10), (2, 20), (3, 30))
    calls.calls.set_sink(3, Sink(3, calls.b, calls.happened))
    calls.happened.clear()
    calls.push((1, 11), (2, 21), (3, 31))
    assert calls.happened[:5] == [(1, 11), "a", (2, 21), (3, 31), "b"]


async def test_the_same_calls_in_a_later_step_are_taken_in_the_same_order() -> None:
    calls = Calls()
    for number, output in ((1, calls.a), (2, calls.b), (3, calls.a)):
        calls.add(number, output)
    for step in range(3):
        calls.happened.clear()
        calls.push((1, step), (2, step), (3, step))
        assert calls.happened[:5] == [(1, step), (3, step), "a", (2, step), "b"]


async def test_a_call_that_ended_between_two_steps_gets_nothing() -> None:
    calls = Calls()
    calls.add(1, calls.a)
    calls.add(2, calls.a)
    calls.push((1, 10), (2, 20))
    calls.calls.forget(1)
    calls.happened.clear()
    calls.push((1, 11), (2, 21))
    assert calls.happened == [(2, 21), "a", "noted"]
