"""What one load is: streams or requests that a client sends, and the times at which their tokens come."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy
from numpy.typing import NDArray

from benchmarks.router_overhead import prompts
from runtime.aio import timeout

PROMPT_TOKENS: Final = 512
REQUESTS, LANES = 512, 64
# The names of the models, which are speeds: tokens a second of each stream, or as fast as it goes.
PACED, HALF, FLAT = "paced", "half", "flat"
STEP_SECONDS: Final = {PACED: 1 / 30, HALF: 1 / 15, FLAT: 0.0}
TOKENS: Final = {PACED: 128, HALF: 64, FLAT: 128}
_PATIENCE_SECONDS: Final = 90.0
# Of all clients: an engine has the prompt of no other request in its prefix cache.
PROMPTS: Final = prompts()

Seconds = NDArray[numpy.float64]


@dataclass(slots=True)
class Answer:
    """What came of one request. `arrivals` are the times of the reads or messages that brought tokens."""

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
    """The answers of one load, and how long all of them took."""

    answers: list[Answer]
    seconds: float

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
        return numpy.array([answer.arrivals[0] - answer.started for answer in self.answers])

    def intervals(self) -> Seconds:
        """Between an arrival of tokens and the next one of the same stream, of all streams."""
        return numpy.concatenate([numpy.diff(answer.arrivals) for answer in self.answers])

    def later_arrivals(self) -> Seconds:
        """The times of all arrivals but each stream's first."""
        return numpy.concatenate([numpy.array(answer.arrivals[1:]) for answer in self.answers])


async def streams(client: LoadClient, model: str, number: int) -> Load:
    """So many streams of 128 tokens (64 at half the pace): paced ones start within a second, the others at once."""
    spread = 1.0 / number if STEP_SECONDS[model] else 0.0

    async def one(delay: float) -> Answer:
        await asyncio.sleep(delay)
        return await client.answer(model, TOKENS[model])

    return await _all([one(index * spread) for index in range(number)])


async def requests(client: LoadClient) -> Load:
    """512 requests of one token, one after another in each of 64 lanes."""
    answers: list[Answer] = []

    async def lane() -> None:
        for _ in range(REQUESTS // LANES):
            answers.append(await client.answer(FLAT, 1))

    load = await _all([lane() for _ in range(LANES)])
    return Load(answers, load.seconds)


async def _all(work: list[Coroutine[Any, Any, Any]]) -> Load:
    started = time.perf_counter()
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        async with timeout(_PATIENCE_SECONDS):
            answers = await asyncio.gather(*tasks)
    finally:
        # If one has failed, the others are not to go on during the next load.
        for task in tasks:
            task.cancel()
    seconds = time.perf_counter() - started
    if short := [answer for answer in answers if answer is not None and answer.tokens < answer.expected]:
        raise ConnectionError(f"{len(short)} answers ended early: {short[0].tokens} of {short[0].expected} tokens")
    return Load(answers, seconds)
