"""A demand for a quota that moves between routers, and the windows in which all of them together must hold it."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.fairness.loads import Bars

ROUTERS = 8
HOT_SECONDS = 20.0  # for which one router has 10 of 17 parts of the demand
_HOT, _COLD = 10, 1


@dataclass(frozen=True)
class Quota:
    """Tokens and requests a second, and the burst in seconds of both. Each prompt has so many tokens."""

    tokens_per_second: float
    requests_per_second: float
    burst_seconds: float
    prompt: int

    @property
    def binding_rate(self) -> float:
        """Requests a second that both allow."""
        return min(self.requests_per_second, self.tokens_per_second / (self.prompt + 1))


class Demand:
    """Which router each request goes to: evenly spaced requests of `load` times the quota."""

    def __init__(self, quota: Quota, load: float, seed: int = 2) -> None:
        self.spacing = 1.0 / (load * quota.binding_rate)
        self._chance = random.Random(seed)

    def choose(self, at: float, live: Sequence[str]) -> str:
        """One of the routers that run; the hot one is another one every 20 s."""
        hot = int(at // HOT_SECONDS) % len(live)
        weights = [_HOT if number == hot else _COLD for number in range(len(live))]
        return self._chance.choices(live, weights)[0]


@dataclass
class Uses:
    """The requests that a quota let pass: when each was sent and when its first answer came."""

    passed: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0
    failed: int = 0  # for another reason: their router was killed

    def within(self, begin: float, end: float) -> int:
        """Those that were answered in a time: requests that wait at its begin use the quota in it."""
        return sum(begin <= answered < end for _, answered in self.passed)

    def worst(self, quota: Quota, units: float, rate: float) -> tuple[float, float]:
        """The largest part of `rate * W + burst` in any window W, and that of what has surely passed in it.

        A request counts as used when its answer came; surely it has if it was also sent in the window.
        """
        burst = max(1.0, rate * quota.burst_seconds)
        answered = sorted(answer for _, answer in self.passed)
        shown = max((_most(answered, units, rate, burst)), default=0.0)
        return shown, _surely(self.passed, units, rate, burst)


def _most(times: Sequence[float], units: float, rate: float, burst: float) -> Iterable[float]:
    """For each end the largest part over all windows, of those that begin with a request."""
    for last, end in enumerate(times):
        for first in range(last + 1):
            yield (last - first + 1) * units / (rate * (end - times[first]) + burst)


def _surely(passed: Sequence[tuple[float, float]], units: float, rate: float, burst: float) -> float:
    """The same of windows that begin when a request was sent and end when one was answered, by those inside."""
    by_sent = sorted(passed, reverse=True)
    most = 0.0
    ends = sorted(answer for _, answer in passed)
    for end in ends[:: max(1, len(ends) // 2000)]:
        count = 0
        for sent, answer in by_sent:
            if answer <= end:
                count += 1
                most = max(most, count * units / (rate * (end - sent) + burst))
    return most


def check_quota(
    bars: Bars, quota: Quota, uses: Uses, demand: tuple[float, float, float], name: str, least: float = 0.98
) -> None:
    """The windows and the sum of a run. `demand` are its size in quotas, its begin and its end."""
    load, begin, end = demand
    name = f"{name}, demand {load:g} x"
    print(f"{name}: {len(uses.passed)} passed, {uses.refused} refused, {uses.failed} failed with their router")
    for what, units, rate in (
        ("tokens of prompts", float(quota.prompt), quota.tokens_per_second),
        ("requests", 1.0, quota.requests_per_second),
    ):
        shown, surely = uses.worst(quota, units, rate)
        print(f"{name}: {what}, by when answers came, as clients saw it: {shown:.3f} of QW + B in the worst window")
        bars.check(f"{name}: {what} of QW + B that surely passed in one window", surely, most=1.0)
    due = min(1.0, load) * quota.binding_rate * (end - begin)
    bars.check(f"{name}: part of min(Q, demand)", uses.within(begin, end) / due, least=least)
