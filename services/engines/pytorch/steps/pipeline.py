"""The steps themselves: each starts while the one before it is in flight, where it may."""

import math
import time
from collections.abc import Callable, Iterator, Sequence

from baton.errors import HandoffLost
from services.engines.memory.allocation import AllocationRules
from services.engines.pytorch.failures import is_out_of_memory, too_large
from services.engines.pytorch.parts import EngineParts
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.runner import InflightStep
from services.engines.pytorch.sequence import Failed, State
from services.engines.pytorch.steps.outcomes import StepOutcomes
from services.engines.pytorch.steps.scheduler import Scheduler

_MASK_POLL_SECONDS = 0.002
LOAD_POLL_SECONDS = 0.001
# Without work for so long, the runner prepares later steps: not while a worker takes over from another one.
_IDLE_SECONDS = 0.5
# A worker that is never idle prepares them between two steps, from so many seconds after its start on: in this share of
# the time, unless one took so long that streams would notice.
_BUSY_SECONDS = 10.0
_PREPARING_SHARE = 0.01
_LONGEST_PREPARING_SECONDS = 0.5


class StepPipeline:
    """Computes what the scheduler chooses, and gives the outcomes to `outcomes`. At most one step is in flight."""

    def __init__(
        self, parts: EngineParts, scheduler: Scheduler, outcomes: StepOutcomes, rules: AllocationRules
    ) -> None:
        self._parts = parts
        self._runner = parts.runner
        self._pool = parts.pool
        self._tiers = parts.tiers
        self._block_tokens = parts.limits.block_tokens
        self._scheduler = scheduler
        self._outcomes = outcomes
        self._rules = rules
        self._inflight: InflightStep | None = None
        self._waited_seconds = 0.0
        self.before_freeing: Callable[[], None] = lambda: None
        """Is called once the outcomes of a step are known, before the blocks of what has ended are freed."""
        self._stuck_since: float | None = None
        self._idle_since: float | None = None
        self._is_prepared = False
        self._prepare_at = time.monotonic() + _BUSY_SECONDS

    def step(self) -> bool:
        """Starts a step, and completes the previous one, if it is in flight. Returns False if there was
        nothing to do.
        """
        if self._outcomes.yielding:
            self._outcomes.yield_waiting()
        if not self._is_prepared and self._scheduler.running:
            self._prepare_if_due()
        inflight, self._inflight = self._inflight, None
        if inflight is None:
            chunks = self._scheduler.schedule()
        else:
            chunks = self._scheduler.schedule_ahead() if inflight.may_be_followed else []
        if chunks:
            self._inflight = self._start(chunks)
        if inflight is not None:
            self._process(inflight)
        elif not chunks:
            self._prepare_if_idle()
            return self._fail_if_stuck()
        self._stuck_since = self._idle_since = None
        if self._inflight is not None and not self._inflight.may_be_followed:
            self.finish_step()
        return True

    def _prepare_if_idle(self) -> None:
        """Uses the time while there is nothing to compute."""
        self._pool.seal_all()
        self._idle_since = self._idle_since or time.monotonic()
        if not self._is_prepared and not self._seconds_until_idle:
            self._is_prepared = not self._runner.prepare_more()

    def _prepare_if_due(self) -> None:
        """Prepares a little between two steps, but not while blocks move: it would wait for them."""
        began = time.monotonic()
        if began < self._prepare_at or (self._tiers is not None and self._tiers.is_busy):
            return
        # To prepare overwrites the ids that a step hands on to the next one on the device.
        self.finish_step()
        self._is_prepared = not self._runner.prepare_more()
        now = time.monotonic()
        is_short = now - began <= _LONGEST_PREPARING_SECONDS
        self._prepare_at = now + (now - began) / _PREPARING_SHARE if is_short else math.inf

    @property
    def _seconds_until_idle(self) -> float:
        now = time.monotonic()
        return max(0.0, (self._idle_since or now) + _IDLE_SECONDS - now)

    def finish_step(self) -> None:
        """Waits for the step in flight, if there is one, and processes its outcome."""
        inflight, self._inflight = self._inflight, None
        if inflight is not None:
            self._process(inflight)

    @property
    def patience_seconds(self) -> float | None:
        """The time of the next step even if nothing happens; None for never."""
        if any(sequence.awaits_mask for sequence in self._scheduler.running):
            return _MASK_POLL_SECONDS
        if self._tiers is not None and self._tiers.is_busy:
            return LOAD_POLL_SECONDS
        if self._stuck_since is None:
            return None if self._is_prepared else self._seconds_until_idle
        return max(0.0, self._stuck_since + self._rules.held_wait_seconds - time.monotonic())

    @property
    def spare_seconds(self) -> float:
        """The time for which this thread waited for the last step; 0 if the device has none to compute now."""
        return self._waited_seconds if self._inflight is not None else 0.0

    def _start(self, chunks: list[Chunk]) -> InflightStep | None:
        """Starts a step. If it runs out of memory, only the request that needs the most memory fails."""
        if self._tiers is not None:
            self._tiers.settle(_written(chunks, self._block_tokens))
        try:
            inflight = self._runner.start(chunks)
        except RuntimeError as error:
            self._drop_largest(chunks, error)
            return None
        for chunk in inflight.chunks:
            flying = chunk.sequence.in_flight
            flying.chunks += 1
            flying.tokens += chunk.filled
            flying.ids += chunk.samples
        return inflight

    def _process(self, inflight: InflightStep) -> None:
        shortage = None
        began = time.monotonic()
        try:
            outcomes = inflight.outcomes()
        except RuntimeError as error:  # sampling on the host allocates, and no step follows such a step
            outcomes, shortage = [None] * len(inflight.chunks), error
        self._waited_seconds = time.monotonic() - began
        for chunk, chosen in zip(inflight.chunks, outcomes, strict=True):
            flying = chunk.sequence.in_flight
            flying.chunks -= 1
            flying.tokens -= chunk.filled
            flying.ids -= chunk.samples
            is_wanted = chunk.sequence.state is State.RUNNING and not flying.is_void
            if shortage is None and is_wanted and not chunk.continues:
                self._outcomes.advance(chunk, chosen)
            flying.is_void = flying.is_void and flying.tokens > 0
        if shortage is not None:
            self._drop_largest(inflight.chunks, shortage)
        if self._outcomes.are_leaving:
            self.before_freeing()
        self._outcomes.end_leaving()
        self._pool.seal()

    def _drop_largest(self, chunks: Sequence[Chunk], error: RuntimeError) -> None:
        """Fails the request that needs the most memory, so that the step can be tried again. Raises other errors."""
        if self._parts.followers is not None or not is_out_of_memory(error):
            raise error  # the other ranks wait amid this step: the group cannot go on
        largest = max(chunks, key=lambda chunk: (chunk.count, chunk.end)).sequence
        self._outcomes.leave(largest, Failed(too_large()))

    def _fail_if_stuck(self) -> bool:
        """Fails the newest running sequence if all wait for a block and none can be preempted.

        It waits while a pull is running, which will end. It waits only briefly for KV that is held for other workers,
        since they may be waiting for this worker.
        """
        stuck = {block for sequence in self._scheduler.running for block in sequence.blocks}
        is_going_on = any(sequence.awaits_mask for sequence in self._scheduler.running)
        is_going_on |= bool(self._scheduler.reserved or self._scheduler.loading or self._scheduler.loans.are_copied)
        if not stuck or is_going_on:
            self._stuck_since = None
            return False
        if self._pool.used > len(stuck):
            self._stuck_since = self._stuck_since or time.monotonic()
            if self.patience_seconds:
                return False
        self._stuck_since = None
        sequence = self._scheduler.running[-1]
        self._scheduler.remove(sequence)
        sequence.sink(
            Failed(HandoffLost("its blocks were needed, and without the embeddings it cannot be run again here"))
        )
        return True

    def drop_step(self) -> None:
        """Forgets the step in flight, whose outcome is lost."""
        self._inflight = None


def _written(chunks: Sequence[Chunk], block_tokens: int) -> Iterator[int]:
    """Yields the blocks that a step writes."""
    for chunk in chunks:
        yield from chunk.sequence.blocks[chunk.start // block_tokens : -(-chunk.end // block_tokens)]
