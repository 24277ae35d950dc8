"""Sends requests to a server, at a rate or so many at once, and measures each answer."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from devtools.bench.servers import Answer, BenchServer, RequestFailed
from devtools.bench.workload import Planned, Workload
from runtime.aio import TaskGroup


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer. Seconds count from when the request was to be sent, so that a slow server is not flattered."""

    at_seconds: float
    first_token_seconds: float  # 0 if it failed before
    seconds: float
    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    worker_id: str = ""  # that ran the prompt
    error: str = ""  # the name of its error; empty if it succeeded

    @property
    def token_seconds(self) -> float:
        """The mean time from one token to the next; 0 for a single one."""
        return (self.seconds - self.first_token_seconds) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Load:
    """Sends requests of one model to a server. Calls `ended` after each answer."""

    def __init__(self, server: BenchServer, model: str, ended: Callable[[Measured], None]) -> None:
        self._server = server
        self._model = model
        self._ended = ended

    async def open_loop(self, planned: Sequence[Planned]) -> list[Measured]:
        """Sends each request at its time, whether or not others have been answered."""
        begin = time.perf_counter()

        async def one(each: Planned) -> Measured:
            await asyncio.sleep(max(0.0, begin + each.at_seconds - time.perf_counter()))
            return await self._measure(each, begin + each.at_seconds, begin)

        async with TaskGroup() as group:
            tasks = [group.create_task(one(each)) for each in planned]
        return [task.result() for task in tasks]

    async def closed_loop(self, planned: Sequence[Planned], concurrency: int) -> list[Measured]:
        """Keeps so many requests running: sends the next one when one has ended."""
        begin, waiting, measured = time.perf_counter(), iter(planned), list[Measured]()

        async def sender() -> None:
            for each in waiting:
                measured.append(await self._measure(each, time.perf_counter(), begin))

        async with TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(sender())
        return measured

    async def _measure(self, planned: Planned, due: float, begin: float) -> Measured:
        first, error, answer = 0.0, "", Answer(len(planned.token_ids), 0, 0)

        def came() -> None:
            nonlocal first
            first = first or time.perf_counter() - due

        try:
            answer = await self._server.answer(self._model, planned, came)
        except RequestFailed as failure:
            error = failure.kind
        measured = Measured(
            at_seconds=due - begin,
            first_token_seconds=first,
            seconds=time.perf_counter() - due,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            asked_tokens=planned.output_tokens,
            worker_id=answer.worker_id,
            error=error,
        )
        self._ended(measured)
        return measured


@dataclass(frozen=True, slots=True)
class AtRate:
    """So many requests a second, sent at random times."""

    rate: float
    requests: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s"

    def plan(self, workload: Workload) -> list[Planned]:
        return workload.at_rate(self.rate, self.requests, self.seed)

    async def run(self, load: Load, planned: Sequence[Planned]) -> list[Measured]:
        return await load.open_loop(planned)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """So many requests at once: the next one is sent when one has ended."""

    concurrency: int
    requests: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once"

    def plan(self, workload: Workload) -> list[Planned]:
        return workload.all_at_once(self.requests, self.seed)

    async def run(self, load: Load, planned: Sequence[Planned]) -> list[Measured]:
        return await load.closed_loop(planned, self.concurrency)


Step: TypeAlias = AtRate | AtOnce


def sweep(rates: Sequence[float], concurrencies: Sequence[int], requests: int, seed: int) -> list[Step]:
    """A step for each, from the least. Their seeds differ: equal prompts would be in the prefix caches."""
    steps: list[Step] = [AtRate(rate, requests, seed + index) for index, rate in enumerate(sorted(rates))]
    begin = seed + len(steps)
    return [*steps, *(AtOnce(each, requests, begin + index) for index, each in enumerate(sorted(concurrencies)))]
