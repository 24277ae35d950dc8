"""What comes for the calls of one stream: the tokens of a step, by the connections that they leave on."""

from dataclasses import dataclass, field

import pytest

from baton.engine.v1 import multiplex_pb2 as pb
from engine_protocol.multiplex.replies import MultiplexedCall
from engine_protocol.multiplex.running_calls import RunningCalls


@dataclass(eq=False)
class Output:
    """Notes when it is flushed."""

    name: str
    happened: list[object]

    def flush_early(self) -> None:
        self.happened.append(self.name)


@dataclass
class Taker:
    """Notes what it is given; raises `error` instead, if there is one."""

    call: int
    output: Output | None
    happened: list[object]
    error: Exception | None = None
    noted: int = 0

    def take(self, token_id: int) -> bool:
        if self.error is not None:
            raise self.error
        self.happened.append((self.call, token_id))
        return True

    def note_taken(self, now: float) -> None:
        self.noted += 1
        self.happened.append("noted")


class NoLink:
    """A stream that takes no wishes."""

    def cancel(self, call: int) -> None:
        pass

    def pause(self, call: int, *, is_paused: bool) -> None:
        pass

    def relay_tokens(self, call: int, taker: object) -> None:
        pass


@dataclass
class Calls:
    """Running calls whose tokens are taken on two outputs."""

    calls: RunningCalls = field(default_factory=RunningCalls)
    happened: list[object] = field(default_factory=list)
    a: Output = field(init=False)
    b: Output = field(init=False)

    def __post_init__(self) -> None:
        self.a, self.b = Output("a", self.happened), Output("b", self.happened)

    def add(self, number: int, output: Output | None, error: Exception | None = None) -> MultiplexedCall[list[int]]:
        call: MultiplexedCall[list[int]] = MultiplexedCall(number, NoLink(), list, list, None)
        self.calls.add(number, call)
        self.calls.relay_tokens(number, Taker(number, output, self.happened, error))
        return call

    def take(self, *tokens: tuple[int, int]) -> None:
        numbers, ids = zip(*tokens, strict=True)
        self.calls.take(pb.MultiplexResponse(token_calls=numbers, token_ids=ids))


async def test_an_output_is_flushed_before_tokens_of_another_one_are_taken() -> None:
    calls = Calls()
    for number, output in ((1, calls.a), (2, calls.b), (3, calls.a)):
        calls.add(number, output)
    calls.take((1, 10), (2, 20), (3, 30))
    assert calls.happened[:5] == [(1, 10), (3, 30), "a", (2, 20), "b"]


async def test_tokens_are_noted_once_all_are_taken() -> None:
    calls = Calls()
    calls.add(1, calls.a)
    calls.add(2, calls.b)
    calls.take((1, 10), (2, 20))
    assert calls.happened == [(1, 10), "a", (2, 20), "b", "noted", "noted"]


async def test_the_tokens_of_a_call_keep_their_order() -> None:
    calls = Calls()
    calls.add(1, calls.a)
    calls.add(2, calls.b)
    calls.take((1, 10), (2, 20), (1, 11), (2, 21))
    assert [each for each in calls.happened if isinstance(each, tuple)] == [(1, 10), (1, 11), (2, 20), (2, 21)]


async def test_a_taker_that_fails_ends_its_call_and_no_other() -> None:
    calls = Calls()
    failing = calls.add(1, calls.a, ValueError("wrong"))
    calls.add(2, calls.a)
    calls.take((1, 10), (2, 20))
    assert calls.happened == [(2, 20), "a", "noted"]
    with pytest.raises(ValueError, match="wrong"):
        await anext(failing)


async def test_tokens_without_a_known_output_are_taken_too() -> None:
    calls = Calls()
    calls.add(1, None)
    calls.take((1, 10))
    assert calls.happened == [(1, 10), "noted"]


async def test_a_call_that_gets_another_output_is_taken_with_its_neighbours_there() -> None:
    calls = Calls()
    for number, output in ((1, calls.a), (2, calls.b), (3, calls.a)):
        calls.add(number, output)
    calls.take((1, 10), (2, 20), (3, 30))
    calls.calls.relay_tokens(3, Taker(3, calls.b, calls.happened))
    calls.happened.clear()
    calls.take((1, 11), (2, 21), (3, 31))
    assert calls.happened[:5] == [(1, 11), "a", (2, 21), (3, 31), "b"]


async def test_the_same_calls_in_a_later_step_are_taken_in_the_same_order() -> None:
    calls = Calls()
    for number, output in ((1, calls.a), (2, calls.b), (3, calls.a)):
        calls.add(number, output)
    for step in range(3):
        calls.happened.clear()
        calls.take((1, step), (2, step), (3, step))
        assert calls.happened[:5] == [(1, step), (3, step), "a", (2, step), "b"]


async def test_a_call_that_ended_between_two_steps_gets_nothing() -> None:
    calls = Calls()
    calls.add(1, calls.a)
    calls.add(2, calls.a)
    calls.take((1, 10), (2, 20))
    calls.calls.forget(1)
    calls.happened.clear()
    calls.take((1, 11), (2, 21))
    assert calls.happened == [(2, 21), "a", "noted"]
