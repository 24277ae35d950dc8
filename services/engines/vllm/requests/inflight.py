"""Every request inside vLLM: submitted, followed, aborted and counted."""

import asyncio
import itertools
from typing import Any

from baton.errors import BatonError, EngineFailed, InvalidRequest, Overloaded, Unavailable
from runtime.aio import timeout
from services.engines.external.requests import ExternalRequests, RequestLimits, text_of
from services.engines.vllm.monitoring import metrics
from services.engines.vllm.package import VllmPackage
from services.engines.vllm.requests.generation import VllmGeneration, VllmRequest


class VllmRequests(ExternalRequests[VllmGeneration]):
    """The requests of one AsyncLLM."""

    def __init__(self, llm: Any, package: VllmPackage, limits: RequestLimits) -> None:
        super().__init__("vLLM", limits.requests, limits.block_tokens)
        self._llm = llm
        self._package = package
        self._limits = limits
        self._numbers = itertools.count()
        self.is_asleep = False  # also while vLLM falls asleep or wakes

    def submit(self, request: VllmRequest) -> VllmGeneration:
        """Submits a request. Raises Overloaded if too many are here, and Unavailable asleep or after a fatal error."""
        self.require_capacity()
        if self.is_asleep:
            # vLLM would answer with other tokens, and without an error.
            raise Unavailable("vLLM sleeps")
        if unknown := sorted(set(request.arguments) - self._package.generate_arguments):
            raise EngineFailed(f"vLLM {self._package.version} does not take {', '.join(unknown)}")
        outputs = self._llm.generate(**request.arguments, request_id=f"baton-{next(self._numbers)}")
        generation = VllmGeneration(request, self._limits.reader_seconds)
        return self.follow(generation, generation.start(outputs, self.progressed))

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

    def fail(self, error: BaseException) -> None:
        """Notes a fatal error."""
        self._fail(error)

    def _converted(self, error: BaseException) -> BatonError:
        if isinstance(error, self._package.overflow_error):
            return Overloaded(str(error), retry_after_seconds=1.0)
        if isinstance(error, self._package.client_error):
            return InvalidRequest.of("prompt", str(error))
        if isinstance(error, self._package.dead_error):
            return self._fail(error)
        return EngineFailed(f"vLLM failed: {text_of(error)}")
