"""Gives a router one load, and notes what it has cost and what the client saw."""

import asyncio
import gc
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy

from benchmarks.peers.clients.load import (
    FLAT,
    HALF,
    PACED,
    STEP_SECONDS,
    TOKENS,
    Answer,
    Load,
    LoadClient,
    Seconds,
    requests,
    steady,
    stream_seconds,
    streams,
)
from benchmarks.peers.clients.steps import since_steps
from benchmarks.peers.cores import Cores, cpu_of_tree
from benchmarks.peers.routers import EACH, EIGHT, Router

# After so long all streams of a load have begun, and so long before the end of one none has ended.
_BEGUN_SECONDS, _BEFORE_END_SECONDS = 1.3, 0.2
_HOW: Final = {PACED: "paced", HALF: "at half the pace", FLAT: "flat out"}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One row of the tables: so many streams of a model, or, with 0 streams, requests of one token.

    The streams start together, or, in a steady load, spread over the length of a stream, each followed by another.
    """

    model: str
    number: int
    way: str = ""
    is_steady: bool = False

    def __str__(self) -> str:
        if not self.number:
            return "a request of 1 token"
        what = f"a token, {self.number:,} streams {_HOW[self.model]}"
        return ", ".join([what, *(["steady"] if self.is_steady else []), *([self.way] if self.way else [])])

    @property
    def is_paced(self) -> bool:
        """True if latencies are the router's, and not its queue's."""
        return bool(self.number and STEP_SECONDS[self.model])

    def way_of(self, router: Router) -> str | None:
        """Which client of the router sends it; None if the router is not reached so."""
        if self.way:
            # Over HTTP/1.1 every stream has a connection for itself anyway.
            return self.way if self.way in router.clients and (self.way != EACH or EIGHT in router.clients) else None
        return EIGHT if EIGHT in router.clients else EACH


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the 99th percentile, in milliseconds."""

    p50: float
    p99: float

    def __str__(self) -> str:
        return f"{self.p50:.2f} / {self.p99:.2f}"


@dataclass(frozen=True, slots=True)
class LaterTokens:
    """Milliseconds of the tokens after a stream's first one.

    `jitter` is the standard deviation of the intervals between tokens; `since_step` is from the end of the engine's
    step to the client, where the engine notes its steps, and `direct` the same of one stream beside the load, which the
    client has from the decode worker itself.
    """

    interval: Spread
    jitter: float
    since_step: Spread | None
    direct: Spread | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one load: microseconds of CPU for each token or request, and latencies.

    `running_microseconds` is that of a token while all streams run, and none begins or ends. `router_cores` and
    `other_cores` say how busy the router and the other cores were, of 1.
    """

    microseconds: float
    client_microseconds: float
    router_cores: float
    other_cores: float
    tokens_a_message: float
    first_token: Spread
    later: LaterTokens | None
    running_microseconds: float | None = None


@dataclass(slots=True)
class Measured:
    """A router, and what it has cost: by load, then by round."""

    router: Router
    samples: dict[LoadPlan, dict[int, Sample]] = field(default_factory=dict)

    async def measure(self, plan: LoadPlan, number: int, cores: Cores) -> None:
        """Round `number` of a load. Raises OSError or TimeoutError if the router does not serve it."""
        way = plan.way_of(self.router)
        if way is None or (self.router.pid is None and not plan.is_paced):
            return
        client = self.router.clients[way]
        gc.collect()
        gc.disable()  # Its pauses would be in the latencies of whichever router is served just then.
        try:
            before, busy = self._cpu(), _busy_seconds(cores.others)
            load, direct, running = await asyncio.gather(_load(client, plan), self._direct(plan), self._running(plan))
            router, own = (now - was for now, was in zip(self._cpu(), before, strict=True))
            busy = _busy_seconds(cores.others) - busy
        finally:
            gc.enable()
        count = load.tokens if plan.number else len(load.answers)
        self.samples.setdefault(plan, {})[number] = Sample(
            microseconds=router / count / 1e3,
            client_microseconds=own / count / 1e3,
            router_cores=router / 1e9 / load.seconds,
            other_cores=busy / load.seconds / len(cores.others),
            tokens_a_message=load.tokens / load.messages,
            first_token=_spread(load.first_token_seconds()),
            later=_later(load, direct, self.router.steps) if plan.is_paced else None,
            running_microseconds=running,
        )

    async def _direct(self, plan: LoadPlan) -> Answer | None:
        """One stream that passes by the router, of the same steps."""
        if not plan.is_paced or self.router.direct is None:
            return None
        if plan.is_steady:
            await asyncio.sleep(stream_seconds(plan.model))
        return await self.router.direct.answer(plan.model, TOKENS[plan.model])

    async def _running(self, plan: LoadPlan) -> float | None:
        """Microseconds for each token while all streams run; None of loads that have no such time."""
        if not plan.is_paced or plan.is_steady:
            return None
        await asyncio.sleep(_BEGUN_SECONDS)
        before, began = self._cpu()[0], time.perf_counter()
        await asyncio.sleep(stream_seconds(plan.model) - _BEGUN_SECONDS - _BEFORE_END_SECONDS)
        tokens = plan.number * (time.perf_counter() - began) / STEP_SECONDS[plan.model]
        return (self._cpu()[0] - before) / tokens / 1e3

    def _cpu(self) -> tuple[int, int]:
        """Nanoseconds of the router and of this process."""
        return (cpu_of_tree(self.router.pid) if self.router.pid else 0), time.process_time_ns()


def _load(client: LoadClient, plan: LoadPlan) -> Coroutine[Any, Any, Load]:
    if not plan.number:
        return requests(client)
    return (steady if plan.is_steady else streams)(client, plan.model, plan.number)


def _later(load: Load, direct: Answer | None, steps: Path | None) -> LaterTokens:
    intervals = load.intervals()
    return LaterTokens(
        _spread(intervals),
        float(numpy.std(intervals)) * 1e3,
        _spread(since_steps(steps, load.later_arrivals())) if steps else None,
        _spread(since_steps(steps, numpy.array(direct.arrivals[1:]))) if steps and direct else None,
    )


def _spread(seconds: Seconds) -> Spread:
    p50, p99 = numpy.percentile(seconds, (50, 99)) * 1e3
    return Spread(float(p50), float(p99))


def _busy_seconds(cores: frozenset[int]) -> float:
    """The time for which these cores have not been idle."""
    names, ticks = {f"cpu{core}" for core in cores}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name in names:
            # User, nice, system, idle, waiting for input, interrupts; what follows is in them, or not ours.
            user, nice, system, _, _, *interrupts = map(int, values[:7])
            ticks += user + nice + system + sum(interrupts)
    return ticks / 100
