"""A decode worker that reads KV while its prompt is computed, as the router that asked for it sees it."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from baton.errors import BatonError
from discovery.record import EARLY_HANDOFF
from router.routing.policy import Placement
from router.workers.handle import WorkerHandle
from runtime.aio import wait_until_done

log = structlog.get_logger(__name__)


class Prefetch:
    """A running Prefetch call. Its failure fails nothing: the decode worker then reads all KV by the handoff."""

    def __init__(self, call: Callable[[], Awaitable[None]], call_id: str) -> None:
        """`call` is made by a task, which may be cancelled before it has begun."""
        self._task = asyncio.ensure_future(_quietly(call, call_id))

    def cancel(self) -> None:
        """Begins to free what no decode has taken."""
        self._task.cancel()

    async def end(self) -> None:
        """Frees what no decode has taken, even during a cancellation."""
        self.cancel()
        await wait_until_done(self._task)


async def _quietly(call: Callable[[], Awaitable[None]], call_id: str) -> None:
    try:
        await call()
    except BatonError as error:
        log.info("no early handoff", call_id=call_id, worker_id=error.worker_id, error=error.message)


def can_hand_over_early(placement: Placement[WorkerHandle]) -> bool:
    """True if the decode worker can read a prompt's first blocks while the prefill worker computes the others."""
    both = (placement.prefill, placement.decode)
    return placement.prefill is not placement.decode and all(
        worker is not None
        and EARLY_HANDOFF in worker.record.capabilities
        # A rank is chosen with each call, so that one call does not know the other's.
        and worker.record.data_parallel_ranks <= 1
        for worker in both
    )
