"""One load: streams or requests that a client sends, and the times at which their tokens come."""

import asyncio
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy
from numpy.typing import NDArray

from benchmarks.router_overhead import prompts
from runtime.aio import timeout

PROMPT_TOKENS: Final = 512
REQUESTS, LANES = 2048, 64
# The names of the models, which are speeds: tokens a second of each stream, or as fast as it goes.
PACED, HALF, FLAT = "paced", "half", "flat"
STEP_SECONDS: Final = {PACED: 1 / 30, HALF: 1 / 15, FLAT: 0.0}
TOKENS: Final = {PACED: 128, HALF: 64, FLAT: 128}
_PATIENCE_SECONDS: Final = 90.0
# So many streams one after another in each lane of a steady load.
STEADY_STREAMS: Final = 2
# Of all clients: an engine has the prompt of no other request in its prefix cache.
PROMPTS: Final = prompts()

Seconds = NDArray[numpy.float64]
Result = TypeVar("Result")


@dataclass(slots=True)
class Answer:
    """The outcome of one request. `arrivals` are the times of the reads or messages that brought tokens."""

    expected: int
    started: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0

    def note(self, now: float, tokens: int) -> None:
        """Tokens have come. What a server sends after the last one is no token."""
        if self.tokens < self.expected:
            self.arrivals.append(now)
            self.tokens = min(self.expected, self.tokens + tokens)


class LoadClient(Protocol):
    """Sends requests to one router."""

    async def answer(self, model: str, tokens: int) -> Answer:
        """A request with a prompt of 512 tokens, until its end. Raises OSError if it fails."""

    def close(self) -> None:
        """Closes all connections."""


@dataclass(slots=True)
class Load:
    """The answers of one load, and how long all of them took.

    Latencies are those of requests that were sent, and of tokens that came, from `begin` to `end`.
    """

    answers: list[Answer]
    seconds: float
    begin: float = -math.inf
    end: float = math.inf

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def messages(self) -> int:
        """The reads or messages that brought them."""
        return sum(len(answer.arrivals) for answer in self.answers)

    def first_token_seconds(self) -> Seconds:
        """For each answer."""
        return numpy.array(
            [each.arrivals[0] - each.started for each in self.answers if self.begin <= each.started <= self.end]
        )

    def intervals(self) -> Seconds:
        """Between an arrival of tokens and the next one of the same stream, of all streams."""
        found = numpy.concatenate([numpy.diff(answer.arrivals) for answer in self.answers])
        return self._within(self._later(), found)

    def later_arrivals(self) -> Seconds:
        """The times of all arrivals but each stream's first."""
        return self._within(self._later(), self._later())

    def _later(self) -> Seconds:
        return numpy.concatenate([numpy.array(answer.arrivals[1:]) for answer in self.answers])

    def _within(self, times: Seconds, of_them: Seconds) -> Seconds:
        found: Seconds = of_them[(times >= self.begin) & (times <= self.end)]
        return found


async def streams(client: LoadClient, model: str, number: int) -> Load:
    """So many streams of 128 tokens (64 at half the pace): paced ones start within a second, the others at once."""
    spread = 1.0 / number if STEP_SECONDS[model] else 0.0

    async def one(delay: float) -> Answer:
        await asyncio.sleep(delay)
        return await client.answer(model, TOKENS[model])

    found = await _gathered([one(index * spread) for index in range(number)])
    return _load(found.results, found.seconds)


async def steady(client: LoadClient, model: str, number: int) -> Load:
    """So many streams at once, which start one after another over the length of a stream; as one ends, another begins.

    Its latencies are those of the time in which all of them run.
    """
    seconds = stream_seconds(model)

    async def lane(delay: float) -> list[Answer]:
        await asyncio.sleep(delay)
        return [await client.answer(model, TOKENS[model]) for _ in range(STEADY_STREAMS)]

    lanes = await _gathered([lane(index * seconds / number) for index in range(number)])
    load = _load([answer for lane in lanes.results for answer in lane], lanes.seconds)
    load.begin = max(lane[0].started for lane in lanes.results)
    load.end = min(lane[-1].arrivals[-1] for lane in lanes.results)
    return load


def stream_seconds(model: str) -> float:
    """The duration of a paced stream, at its pace."""
    return TOKENS[model] * STEP_SECONDS[model]


async def requests(client: LoadClient) -> Load:
    """2,048 requests of one token, one after another in each of 64 lanes."""

    async def lane() -> list[Answer]:
        return [await client.answer(FLAT, 1) for _ in range(REQUESTS // LANES)]

    lanes = await _gathered([lane() for _ in range(LANES)])
    return _load([answer for lane in lanes.results for answer in lane], lanes.seconds)


@dataclass(frozen=True, slots=True)
class _Gathered(Generic[Result]):
    results: list[Result]
    seconds: float


async def _gathered(work: list[Coroutine[Any, Any, Result]]) -> _Gathered[Result]:
    started = time.perf_counter()
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        async with timeout(_PATIENCE_SECONDS):
            results = await asyncio.gather(*tasks)
    finally:
        # If one has failed, the others are not to go on during the next load.
        for task in tasks:
            task.cancel()
    return _Gathered(results, time.perf_counter() - started)


def _load(answers: list[Answer], seconds: float) -> Load:
    if short := [answer for answer in answers if answer.tokens < answer.expected]:
        raise ConnectionError(f"{len(short)} answers ended early: {short[0].tokens} of {short[0].expected} tokens")
    return Load(answers, seconds)
