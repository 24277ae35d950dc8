"""Tokens are counted as they come, one by one or those of a step together: nothing that is measured can tell which."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interpreted import interpreted
from support.running_calls import NoLink

from baton.engine.v1 import multiplex_pb2 as pb
from engine_protocol.multiplex import running_calls
from engine_protocol.multiplex.replies import MultiplexedCall
from engine_protocol.multiplex.running_calls import RunningCalls
from router.routing.latency import DecodeTimer, WorkerLatency
from router.stream import meter
from router.stream.meter import TokenMeter
from router.telemetry.stats import RequestStats

# Of each call in one step: no token, or the number of its tokens, and whether the first is one that detokenizes, or one
# that the sink refuses; or the sink is taken away before the step, and given again after it.
PLAIN, GENERAL, REFUSED, NONE, TWO, UNSET = range(6)
_KINDS = st.sampled_from([PLAIN] * 12 + [GENERAL, REFUSED, NONE, TWO, UNSET])
_CALLS = 4


@dataclass(eq=False)
class Counted:
    """Latencies that keep what they are told."""

    seconds: list[float] = field(default_factory=list)

    @property
    def single(self) -> "Counted":
        return self

    def observe(self, seconds: float, tokens: int = 1) -> None:
        self.seconds += [round(seconds)] * tokens


class Sink:
    """Counts its tokens with a real meter."""

    wire = None

    def __init__(self, latencies: Counted, latency: WorkerLatency) -> None:
        self.stats = RequestStats("r-1", model="m", prompt_tokens=5)
        self.ids: list[int] = []
        self.meter = TokenMeter(self.stats, latencies, self.ids)
        self.meter.begin_call(DecodeTimer(latency, 0, 1))
        self.kinds: list[int] = []

    def push(self, token_id: int) -> bool:
        kind = self.kinds.pop(0)
        if kind == REFUSED:
            return False
        if kind == GENERAL:
            self.meter.detokenized_for(5)
        self.ids.append(token_id)
        return True


class Time:
    """Seconds, a whole number of which each step takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(running_calls, "monotonic", lambda: self.now)
        monkeypatch.setattr("router.stream.meter.monotonic", lambda: self.now)
        monkeypatch.setattr("router.telemetry.timings.perf_counter_ns", lambda: int(self.now * 1e9))


def _numbers(step: Sequence[int]) -> list[int]:
    return [call for call, kind in enumerate(step) if kind not in (NONE,) for _ in range(2 if kind == TWO else 1)]


@interpreted(meter)
@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(*[_KINDS] * _CALLS), min_size=3, max_size=25))
def test_each_token_is_counted_with_the_time_since_the_one_before(steps: Sequence[Sequence[int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        time, calls = Time(monkeypatch), RunningCalls()
        counted, latency = Counted(), WorkerLatency(lambda: time.now)
        sinks = [Sink(counted, latency) for _ in range(_CALLS)]
        for number, sink in enumerate(sinks):
            call: MultiplexedCall[list[int]] = MultiplexedCall(number, NoLink(), list, list, None)  # type: ignore[type-var]
            calls.add(number, call)
            calls.set_sink(number, sink)
        # The times of the tokens that each sink has accepted; before the first one nothing has come.
        times: list[list[float]] = [[0.0] for _ in sinks]
        for length, step in enumerate(steps, start=1):
            time.now += length
            for number, kind in enumerate(step):
                if kind == UNSET:
                    calls.set_sink(number, None)
                sinks[number].kinds = [PLAIN if kind in (TWO, PLAIN) else kind, PLAIN]
                if kind not in (NONE, REFUSED, UNSET):
                    times[number] += [time.now] * (2 if kind == TWO else 1)
            numbers = _numbers(step)
            calls.push(pb.MultiplexResponse(token_calls=numbers, token_ids=[7] * len(numbers)))
            for number, kind in enumerate(step):
                if kind == UNSET:
                    calls.set_sink(number, sinks[number])
        for sink in sinks:
            sink.meter.end_call()
        expected = [round(after - before) for each in times for before, after in pairwise(each)]
        assert sorted(counted.seconds) == sorted(expected)
        assert [sink.stats.completion_tokens for sink in sinks] == [len(each) - 1 for each in times]
