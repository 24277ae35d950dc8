"""Every request inside vLLM: submitted, followed, aborted and counted."""

import asyncio
import itertools
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from baton.errors import BatonError, EngineFailed, InvalidRequest, Overloaded
from runtime.aio import timeout
from services.engines.vllm.monitoring import metrics
from services.engines.vllm.package import VllmPackage
from services.engines.vllm.requests.generation import VllmGeneration, VllmRequest

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """How many requests may run and wait, and how long a reader and an abort may take, in seconds."""

    requests: int
    block_tokens: int
    reader_seconds: float
    abort_seconds: float


class VllmRequests:
    """A fatal error of the engine fails all requests, and every later one."""

    def __init__(self, llm: Any, package: VllmPackage, limits: VllmLimits) -> None:
        self.failure: EngineFailed | None = None
        self._llm = llm
        self._package = package
        self._limits = limits
        self._tasks: dict[VllmGeneration, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._progressed_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def blocks(self) -> int:
        """Blocks of their tokens so far."""
        return sum(-(-each.num_tokens // self._limits.block_tokens) for each in self._tasks)

    @property
    def quiet_seconds(self) -> float:
        """How long there has been no progress, with work or without."""
        return time.monotonic() - self._progressed_at

    def progressed(self) -> None:
        """Notes that the engine made progress of any kind."""
        self._progressed_at = time.monotonic()

    def submit(self, request: VllmRequest) -> VllmGeneration:
        """Submits a request. Raises Overloaded if too many are here, and EngineFailed after a fatal error."""
        if self.failure is not None:
            raise self.failure
        if len(self._tasks) >= self._limits.requests:
            raise Overloaded(f"{len(self._tasks)} requests run and wait here", retry_after_seconds=1.0)
        if unknown := sorted(set(request.arguments) - self._package.generate_arguments):
            raise EngineFailed(f"vLLM {self._package.version} does not take {', '.join(unknown)}")
        outputs = self._llm.generate(**request.arguments, request_id=f"baton-{next(self._numbers)}")
        generation = VllmGeneration(request, self._limits.reader_seconds)
        task = generation.start(outputs, self.progressed)
        self._tasks[generation] = task
        task.add_done_callback(partial(self._ended, generation))
        return generation

    async def drop(self, generation: VllmGeneration) -> None:
        """Aborts a request, and returns when vLLM has freed its blocks, within `abort_seconds`."""
        task = self._tasks.get(generation)
        if task is None:
            return
        metrics.ABORTS.inc()
        generation.stop()
        await asyncio.wait([task])
        await self.settled()

    async def settled(self) -> None:
        """Waits until vLLM has handled all that was sent to it: its core answers this question after the aborts."""
        if self.failure is not None:
            return
        try:
            async with timeout(self._limits.abort_seconds):
                await self._llm.is_sleeping()
        except TimeoutError:
            metrics.UNANSWERED_ABORTS.inc()
        except self._package.dead_error as error:
            self._fail(error)

    async def close(self) -> None:
        """Stops following all requests."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, generation: VllmGeneration, task: "asyncio.Task[None]") -> None:
        del self._tasks[generation]
        generation.end(self._why(task))

    def _why(self, task: "asyncio.Task[None]") -> BatonError | None:
        if task.cancelled():
            return EngineFailed("the request was aborted")
        error = task.exception()
        if error is None:
            self.progressed()
            return None
        if isinstance(error, BatonError):
            return error
        if isinstance(error, self._package.overflow_error):
            return Overloaded(str(error), retry_after_seconds=1.0)
        if isinstance(error, self._package.client_error):
            return InvalidRequest.of("prompt", str(error))
        if isinstance(error, self._package.dead_error):
            return self._fail(error)
        return EngineFailed(f"vLLM failed: {_text(error)}")

    def _fail(self, error: BaseException) -> EngineFailed:
        if self.failure is None:
            log.error("vllm engine failed", error=_text(error))
            self.failure = EngineFailed(f"vLLM has ended: {_text(error)}")
        return self.failure


def _text(error: BaseException) -> str:
    """With the cause: vLLM raises an EngineGenerateError without a message from whatever went wrong."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text}, from {_text(error.__cause__)}" if error.__cause__ else text
