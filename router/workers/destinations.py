"""A decode worker's allocation from before the prompt is computed, as the router that asked for it holds it.

Early reads of KV, and loans of prefixes between workers, as a request's calls ask for them and tell of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog

from baton.engine.v1 import handoff_pb2
from baton.errors import BatonError, HandoffLost, Unavailable
from discovery.record import ALLOCATES_FIRST, EARLY_HANDOFF
from engine_protocol.leases import SHORTEST_SECONDS, RemoteLease, renew
from router.routing.policy import Placement, Progress
from router.workers.handle import WorkerHandle
from rpc.channels import best_effort
from runtime.aio import run_with_background, wait_until_done

Result = TypeVar("Result")

_RETRY_SECONDS = 0.2
# How long a prompt may be computed for a decode worker that is gone.
_LONGEST_DELAY_SECONDS = 1.0
log = structlog.get_logger(__name__)


class DestinationLost(Exception):
    """A decode worker did not allocate, or lost what it had allocated, before the prompt was computed."""

    def __init__(self, error: BatonError) -> None:
        super().__init__(error.message)
        self.error = error


class Destination:
    """Blocks of `worker`, under a lease that is renewed while the prompt is computed."""

    def __init__(self, message: handoff_pb2.KvDestination, worker: WorkerHandle) -> None:
        self.message = message
        self.worker = worker
        self._lease = RemoteLease(message.destination_id, message.epoch, message.lease.ToNanoseconds() / 1e9)

    async def during(self, prefill: Coroutine[Any, Any, Result]) -> Result:
        """The result of `prefill`, which is cancelled once the blocks are lost. Raises DestinationLost then, and if the
        prefill worker finds out first.
        """
        try:
            return await run_with_background(self._keep(), prefill)
        except HandoffLost as error:
            raise DestinationLost(error) from error

    async def release(self, reader: str) -> None:
        """Frees the blocks, even during a cancellation. If that fails they are freed with the lease."""
        if self._lease.is_over:
            return
        request = self._lease.release_request(reader)
        owner = self.worker
        await best_effort(lambda seconds: owner.handoff.Release(request, timeout=seconds), healthy=not owner.problem)

    async def _keep(self) -> None:
        delay = self._lease.renewal_delay_seconds
        while True:
            await asyncio.sleep(min(delay, _LONGEST_DELAY_SECONDS))
            try:
                seconds = max(SHORTEST_SECONDS, self._lease.remaining_seconds)
                await renew(self.worker.handoff, [self._lease], seconds)
                delay = self._lease.renewal_delay_seconds
            except Unavailable as error:
                # A worker that is well otherwise may answer before the lease ends.
                delay = _RETRY_SECONDS
                if not self._lease.remaining_seconds or self.worker.problem or self.worker.leaving.is_set():
                    raise self._lost(error.message) from error
            except BatonError as error:
                raise self._lost(error.message) from error
            if not self._lease.remaining_seconds:
                raise self._lost("its lease has ended")

    def _lost(self, why: str) -> HandoffLost:
        return HandoffLost(f"worker {self.worker.record.worker_id} lost the blocks that it had allocated: {why}")


def allocates_first(placement: Placement[WorkerHandle]) -> bool:
    """True if the decode worker allocates before the prefill worker computes."""
    prefill, decode = placement.prefill, placement.decode
    if prefill is None or ALLOCATES_FIRST not in prefill.record.capabilities:
        return False
    return ALLOCATES_FIRST in decode.record.capabilities


# A loan that takes no longer than this is never late.
_LEAST_PATIENCE_SECONDS = 0.05


def prefix_source(placement: Placement[WorkerHandle], worker: WorkerHandle) -> handoff_pb2.PrefixSource | None:
    """The source of the prompt's beginning for this worker; None if it is to compute it, or not to run it."""
    prediction = placement.prediction
    if prediction is None or prediction.load.peer is None or prediction.runs_on is not worker:
        return None
    peer = prediction.load.peer
    source = handoff_pb2.PrefixSource(
        worker_id=peer.record.worker_id,
        epoch=peer.record.epoch,
        address=peer.record.address,
        data_parallel_rank=peer.rank,
        num_blocks=peer.num_blocks,
    )
    source.patience.FromNanoseconds(int(max(_LEAST_PATIENCE_SECONDS, peer.saved_seconds) * 1e9))
    return source


def report_loan(progress: Progress, usage: handoff_pb2.PromptUsage) -> None:
    """Tells the policy what a loan has brought, if one was asked for. Wrong values are cut."""
    if usage.HasField("peer_seconds"):
        tokens = min(usage.peer_cached_tokens, usage.cached_tokens)
        progress.borrowed(tokens, max(0.0, usage.peer_seconds.seconds + usage.peer_seconds.nanos / 1e9))
    if usage.peer_has_none:
        progress.peer_has_none()


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
