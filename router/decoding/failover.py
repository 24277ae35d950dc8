"""The worker that a request continues on when one has failed, or has given it away."""

from baton.errors import (
    BatonError,
    EmbeddingLost,
    HandoffLost,
    LayoutMismatch,
    NoWorker,
    Overloaded,
    StaleEpoch,
    Unavailable,
)
from router.decoding.state import ExecutionState
from router.moving.decodes import Yielded
from router.routing.policy import Placement
from router.routing.retry import Attempts, DoubtedRefusal
from router.telemetry import metrics
from router.workers.calls import RETRYABLE
from router.workers.handle import WorkerHandle
from runtime.aio import timeout

_Placement = Placement[WorkerHandle]

# The KV or embedding that the worker was to read is gone, or does not fit. The worker is not to blame, and may run the
# prompt itself.
LEASE_LOST = (HandoffLost, EmbeddingLost, StaleEpoch, LayoutMismatch)


class Failover:
    """Chooses where one request continues, within its budget of retries."""

    def __init__(self, state: ExecutionState) -> None:
        self._state = state

    def another_prefill(self, placement: _Placement, error: BatonError, tried: frozenset[str]) -> _Placement:
        """The placement of a request whose prefill has failed. Raises `error` if nothing else can run its prompt."""
        try:
            found = self._state.placer.replace_prefill(placement, self._state.routing_request, tried)
        except NoWorker:
            raise error from None
        if found.prefill is None and isinstance(error, Overloaded):
            # Prompts that the prefill workers have no room for must not displace decoding.
            found.progress.close()
            raise error
        return found

    async def continue_elsewhere(self, placement: _Placement, error: BatonError, attempts: Attempts) -> _Placement:
        """The placement, without prefill, of a request that its decode worker has failed."""
        state = self._state
        state.progress.close()
        state.suspect(placement.decode, "decode", error)
        if state.held and state.yielded:
            is_lost = isinstance(error, LEASE_LOST)
            if (found := state.yielded.next_reader(placement.decode, is_lost=is_lost)) is not None:
                return state.follow(Placement(found))
        attempts.allow(error, has_tokens=bool(state.completion.token_ids))
        if isinstance(error, EmbeddingLost):
            state.prompt.invalidate(has_tokens=bool(state.completion.token_ids))
        if isinstance(error, RETRYABLE) or (isinstance(error, LayoutMismatch) and not state.held):
            attempts.exclude(placement.decode.record.process)
        await state.release_handoff()
        if state.placer.can_decode(state.routing_request, state.context_tokens, attempts.tried):
            await attempts.pause(error, state.ctx.deadline.remaining_seconds)
        elif isinstance(error, DoubtedRefusal) and not state.completion.token_ids:
            raise error
        placement = state.follow(await self.another_decode(error, attempts.tried))
        self.count_migration("decode")
        return placement

    async def move_on(self, yielded: Yielded) -> _Placement:
        """The placement of a decode that has yielded: with its KV, or, if it had none, from its ids."""
        state = self._state
        state.progress.close()
        found = yielded.reader() or (state.held.owner if state.held else None)
        if found is None:
            unmoved = Unavailable("the decode has yielded without KV, and no other worker can take it over")
            return state.follow(await self.another_decode(unmoved, frozenset()))
        return state.follow(Placement(found))

    async def another_decode(self, error: BatonError, tried: frozenset[str]) -> _Placement:
        """Waits for a decode worker that can continue from the ids. Raises NoWorker or `error` if none comes."""
        state = self._state
        if state.is_disaggregated:
            # To continue, a decode worker would have to run the prompt.
            raise NoWorker(f"a disaggregated request cannot continue without its handoff: {error.message}") from error
        try:
            # Waiting is worth it: the client has tokens already.
            async with timeout(state.retries.wait_seconds):
                return await state.placer.await_decode(state.routing_request, state.context_tokens, tried)
        except TimeoutError:
            if isinstance(error, LEASE_LOST):
                # Another worker would have run the prompt, were there one: that is what ends the request.
                raise NoWorker(f"no decode worker became ready to continue: {error.message}") from error
            raise error from None

    def count_migration(self, stage: str) -> None:
        """Counts that the request has gone to another worker."""
        self._state.ctx.stats.migrations += 1
        metrics.MIGRATIONS.labels(stage).inc()
