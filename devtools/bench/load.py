"""Sends requests to a cluster and measures each answer."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton import AsyncClient
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, sampling_pb2
from devtools.bench.workload import Planned
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
    worker_id: str = ""  # that ran the prompt
    error: str = ""  # the name of its status; empty if it succeeded

    @property
    def token_seconds(self) -> float:
        """The mean time from one token to the next; 0 for a single one."""
        return (self.seconds - self.first_token_seconds) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Load:
    """Sends requests by several connections, which share them by turns. Calls `ended` after each answer."""

    def __init__(
        self, clients: Sequence[AsyncClient], model: str, timeout_seconds: float, ended: Callable[[Measured], None]
    ) -> None:
        self._clients = clients
        self._model = model
        self._timeout_seconds = timeout_seconds
        self._ended = ended

    async def open_loop(self, planned: Sequence[Planned]) -> list[Measured]:
        """Sends each request at its time, whether or not others have been answered."""
        begin = time.perf_counter()

        async def one(number: int, each: Planned) -> Measured:
            await asyncio.sleep(max(0.0, begin + each.at_seconds - time.perf_counter()))
            return await self._measure(number, each, begin + each.at_seconds, begin)

        async with TaskGroup() as group:
            tasks = [group.create_task(one(number, each)) for number, each in enumerate(planned)]
        return [task.result() for task in tasks]

    async def closed_loop(self, planned: Sequence[Planned], concurrency: int) -> list[Measured]:
        """Keeps so many requests running: sends the next one when one has ended."""
        begin, waiting, measured = time.perf_counter(), iter(enumerate(planned)), list[Measured]()

        async def sender() -> None:
            for number, each in waiting:
                measured.append(await self._measure(number, each, time.perf_counter(), begin))

        async with TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(sender())
        return measured

    async def _measure(self, number: int, planned: Planned, due: float, begin: float) -> Measured:
        request = generate_pb2.GenerateRequest(
            model=self._model,
            token_ids=generate_pb2.TokenIds(ids=planned.token_ids),
            stopping=sampling_pb2.StoppingOptions(max_tokens=planned.output_tokens, ignore_eos=True),
        )
        first, error = 0.0, ""
        finished = generate_pb2.Finished()
        try:
            async for event in self._clients[number % len(self._clients)].generate(
                request, timeout_seconds=self._timeout_seconds
            ):
                if event.HasField("token") and not first:
                    first = time.perf_counter() - due
                elif event.HasField("finished"):
                    finished = event.finished
        except BatonError as failure:
            error = type(failure).__name__
        measured = Measured(
            at_seconds=due - begin,
            first_token_seconds=first,
            seconds=time.perf_counter() - due,
            prompt_tokens=len(planned.token_ids),
            cached_tokens=finished.usage.cached_tokens,
            output_tokens=finished.usage.completion_tokens,
            worker_id=finished.prefill_worker_id or finished.decode_worker_id,
            error=error,
        )
        self._ended(measured)
        return measured
