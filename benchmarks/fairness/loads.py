"""The loads of tenants, the service that they got, and the bars of both: by processes or in virtual time."""

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

SLICE = 10.0  # seconds
STEPS = 10  # in which a window of a slice moves on
TOKEN_WORK = 4.0
_SPREAD = 0.6  # of log-normal lengths


@dataclass(frozen=True)
class Load:
    """A tenant's requests: how many a second, their tokens (medians), from when on. `grouped` are tokens a message."""

    rate: float
    prompt: int = 2000
    answer: int = 40
    begins: float = 0.0
    grouped: int = 8


@dataclass(frozen=True)
class Sent:
    """One request: when, and its tokens."""

    at: float
    prompt: int
    answer: int


def requests_of(load: Load, seed: str) -> Iterator[Sent]:
    """A tenant's requests, for ever: Poisson in time, lengths log-normal."""
    chance, at = random.Random(seed), load.begins
    while True:
        at += chance.expovariate(load.rate)
        prompt = max(16, int(chance.lognormvariate(math.log(load.prompt), _SPREAD)))
        yield Sent(at, prompt, max(4, int(chance.lognormvariate(math.log(load.answer), _SPREAD))))


@dataclass
class Got:
    """The service of a tenant: its times to the first token, and its work by tenths of a slice."""

    first_tokens: list[float] = field(default_factory=list)
    work: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    refused: int = 0

    def count(self, at: float, tokens: int, prompt: int = 0) -> None:
        """Adds tokens of an answer that came at a time, the first with its prompt."""
        self.work[int(at * STEPS // SLICE)] += prompt + TOKEN_WORK * tokens

    def between(self, begin: float, end: float) -> float:
        """The work of a time, of whole seconds."""
        return sum(self.work[step] for step in range(int(begin * STEPS // SLICE), int(end * STEPS // SLICE)))

    def quantile(self, part: float) -> float:
        """Of the times to the first token."""
        return quantile(self.first_tokens, part)

    def p99_range(self) -> tuple[float, float]:
        """Between which the p99 is, with 95 % confidence: order statistics by the binomial's normal approximation."""
        ordered, count = sorted(self.first_tokens), len(self.first_tokens)
        middle, width = 0.99 * count, 1.96 * math.sqrt(0.99 * 0.01 * count)
        low, high = max(0, math.floor(middle - width)), math.ceil(middle + width)
        return ordered[low], ordered[high] if high < count else math.inf


def quantile(values: Iterable[float], part: float) -> float:
    """The smallest value that is above this part of them; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else math.nan


def ratios(one: Got, other: Got, begin: float, end: float) -> list[float]:
    """The larger by the smaller work in every window of a slice, each a tenth of it later."""
    step = SLICE / STEPS
    windows = [begin + number * step for number in range(int((end - begin - SLICE) / step) + 1)]
    pairs = [sorted((one.between(at, at + SLICE), other.between(at, at + SLICE))) for at in windows]
    return sorted(most / max(1.0, least) for least, most in pairs)


@dataclass
class Bars:
    """The results that have a bar, and whether each holds."""

    missed: list[str] = field(default_factory=list)

    def check(self, name: str, value: float, least: float = -math.inf, most: float = math.inf) -> None:
        """Prints a result beside its bar."""
        holds = least <= value <= most
        bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (most < math.inf)
        print(f"{name}: {value:.3f} ({' and '.join(bounds)}): {'holds' if holds else 'MISSED'}", flush=True)
        if not holds:
            self.missed.append(name)


def check_light(bars: Bars, alone: Got, beside: Got, name: str) -> None:
    """The light tenant's times beside a flood, and alone."""
    for what, got in (("alone", alone), ("beside 20 x", beside)):
        low, high = got.p99_range()
        print(
            f"{name}, light {what}: {len(got.first_tokens)} requests, {got.refused} refused, p50 "
            f"{got.quantile(0.5):.3f} s, p99 {got.quantile(0.99):.3f} s (95 % confidence: {low:.3f} to {high:.3f} s)"
        )
    bars.check(f"{name}, light: p99 beside 20 x by alone", beside.quantile(0.99) / alone.quantile(0.99), most=2.5)


def check_shapes(bars: Bars, one: Got, other: Got, begin: float, end: float, name: str, *, has_bar: bool) -> None:
    """The work of two tenants in every ten seconds."""
    found = ratios(one, other, begin, end)
    print(
        f"{name}, two shapes: larger by smaller work in {len(found)} windows of 10 s: median "
        f"{quantile(found, 0.5):.3f}, p95 {quantile(found, 0.95):.3f}, worst {found[-1]:.3f}",
        flush=True,
    )
    if has_bar:
        bars.check(f"{name}, two shapes: p95", quantile(found, 0.95), most=1.2)


def check_late(bars: Bars, early: Got, late: Got, begins: float, name: str, *, has_bar: bool) -> None:
    """The work of a tenant that comes later, from ten seconds after that on, for half a minute."""
    begin, end = begins + 10, begins + 40
    part = late.between(begin, end) / max(1.0, early.between(begin, end))
    if has_bar:
        bars.check(f"{name}, late by {begins:.0f} s: its part of the early one's work", part, least=0.9, most=1.1)
    else:
        print(f"{name}, late by {begins:.0f} s: its part of the early one's work: {part:.3f}", flush=True)


def total(got: Iterable[Got], begin: float, end: float) -> float:
    """The work a second of all tenants."""
    return sum(one.between(begin, end) for one in got) / (end - begin)


def check_throughput(bars: Bars, works: Sequence[tuple[str, float]]) -> None:
    """The work of the turns of `none` and of `weighted`."""
    for name, work in works:
        print(f"{name}: {work:.0f} work/s")
    sums = {which: sum(work for name, work in works if name == which) for which in ("none", "weighted")}
    bars.check("throughput: weighted by none", sums["weighted"] / sums["none"], least=0.97)
