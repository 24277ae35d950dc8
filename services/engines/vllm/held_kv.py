"""KV that vLLM holds for readers: how much, and until when it certainly does.

vLLM frees it when a reader has read it, or after its own lease, whichever comes first, and does not tell anyone. Each
handoff has one reader, by Baton's lease. So within vLLM's lease, counted from before vLLM had the request, the blocks
have been held throughout; after it only vLLM's workers know.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import structlog

from runtime.aio import timeout
from services.engines.external.held_kv import ExternalKv, ExternalPrefill, HeldHandoffs
from services.engines.vllm.monitoring import metrics

log = structlog.get_logger(__name__)
_RETRY_SECONDS = 0.05
_ASK_SECONDS = 5.0
# A worker learns of a handoff with the step after the prefill's.
_TRIES = 4


class AsksWorkers(Protocol):
    """AsyncLLM's call of a method on each of its workers."""

    async def collective_rpc(self, method: str, *, timeout: float | None, args: tuple[Any, ...]) -> Sequence[Any]: ...


class HeldByVllm(HeldHandoffs):
    """The handoffs of one engine, by our own count, and by its workers' word."""

    def __init__(self, workers: AsksWorkers, seconds: float, block_tokens: int) -> None:
        super().__init__(seconds, block_tokens)
        self._workers = workers

    def hold(self, key: object, tokens: int) -> None:
        super().hold(key, tokens)
        metrics.HANDOFFS.set(len(self))

    def free(self, key: object) -> int:
        blocks = super().free(key)
        metrics.HANDOFFS.set(len(self))
        return blocks

    async def still_holds(self, request_id: str) -> bool:
        """True if every worker holds the blocks now, so that it has held them since the prefill."""
        return all(await self._ask("baton_holds", request_id))

    async def release_early(self, request_id: str) -> bool:
        """Lets vLLM free the blocks at its next step. Returns whether its workers had them."""
        for _ in range(_TRIES):
            if all(await self._ask("baton_release", request_id)):
                metrics.EARLY_RELEASES.inc()
                return True
            await asyncio.sleep(_RETRY_SECONDS)
        return False

    async def _ask(self, method: str, request_id: str) -> Sequence[Any]:
        """One answer of each worker; one refusal if they cannot be asked."""
        try:
            async with timeout(_ASK_SECONDS):
                answers = await self._workers.collective_rpc(method, timeout=_ASK_SECONDS, args=(request_id,))
        except Exception as error:  # vLLM has no narrower class for a core that has ended or refuses
            log.info("vllm workers not asked", method=method, error=f"{type(error).__name__}: {error}")
            return [False]
        return answers or [False]


class VllmHeldKv(ExternalKv):
    """An EngineHeldKv that also says whether its blocks were held until now. See ConfirmsKv.

    vLLM knows it by `request_id`, and may free it at `until` of time.monotonic, however long the prompt took.
    """

    def __init__(self, prefilled: ExternalPrefill, request_id: str, held: HeldByVllm, until: float) -> None:
        super().__init__(prefilled)
        self._request_id = request_id
        self._held = held
        self._until = until
        if prefilled.engine_state:
            held.hold(self, prefilled.num_tokens)

    @property
    def is_held(self) -> bool:
        """True if vLLM's own lease has not ended yet."""
        return time.monotonic() < self._until

    async def was_held(self) -> bool:
        """True if vLLM has held the blocks until now, or until its reader had them."""
        if self.is_held or await self._held.still_holds(self._request_id):
            return True
        metrics.EXPIRED.inc()
        return False

    async def release(self) -> int:
        """Frees the blocks, before vLLM's lease ends if no reader had them. Returns how many."""
        if self in self._held and not self.is_fetched:
            await self._held.release_early(self._request_id)
        return self._held.free(self)
