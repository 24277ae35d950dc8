"""Who takes part in the next step, who waits, and who gives way when the pool is full."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rpc.errors import BatonError, Overloaded
from services.engines.pytorch.batch import Chunk
from services.engines.pytorch.blocks import BlockPool
from services.engines.pytorch.sequence import State, TokenSequence


@dataclass(eq=False, slots=True)
class BlockReservation:
    """Blocks for KV that another worker has, or, in the queue, the wish for them. `settled` hears what became of it."""

    num_tokens: int
    hashes: list[bytes]
    settled: Callable[[BatonError | None], None]
    state: State = State.NEW
    blocks: list[int] = field(default_factory=list)
    granted_ids: tuple[int, ...] = ()
    cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step, and the engine, takes on."""

    max_sequences: int
    max_step_tokens: int
    max_waiting: int
    block_tokens: int
    prefix_cache: bool


class Scheduler:
    """First come, first served, by steps of bounded size: each running sequence decodes, the rest is for prompts.

    A sequence gets the blocks for all its tokens when it is admitted, and one more whenever it outgrows them. If there
    is none, the newest running sequence gives all of its own back and waits at the front, to be computed again; unless
    it was pulled without the embeddings of its media: then it keeps its blocks, and waits without a step. What is held
    or reserved is never taken away; its holder gives it back within the lease.
    """

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.running: list[TokenSequence] = []
        self.waiting: deque[TokenSequence | BlockReservation] = deque()
        self.preemptions = 0
        self.reserved = 0
        self._pool = pool
        self._limits = limits
        self._last_wait_seconds = 0.0

    def enqueue(self, item: TokenSequence | BlockReservation) -> None:
        """Puts a request at the end of the queue. Raises Overloaded if that is full."""
        if len(self.waiting) >= self._limits.max_waiting:
            retry_after = max(0.1, self._last_wait_seconds)
            raise Overloaded(f"{len(self.waiting)} requests are waiting already", retry_after_seconds=retry_after)
        item.state = State.WAITING
        self.waiting.append(item)

    def join(self, sequence: TokenSequence) -> None:
        """Lets a sequence run that has its blocks already."""
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def remove(self, item: TokenSequence | BlockReservation) -> int:
        """Takes a request out, whatever its state, and gives its blocks back; returns how many."""
        if item.state is State.WAITING:
            self.waiting.remove(item)
        elif item.state is State.RUNNING and isinstance(item, TokenSequence):
            self.running.remove(item)
        elif item.state is State.RESERVED:
            self.reserved -= 1
        item.state = State.DONE
        return self._free(item)

    def hold(self, sequence: TokenSequence) -> None:
        """Takes a sequence out of the steps and lets it keep its blocks."""
        self.running.remove(sequence)
        sequence.state = State.HELD

    def take_over(self, reservation: BlockReservation, sequence: TokenSequence) -> None:
        """Gives the blocks of a reservation, filled by now, to the sequence, which runs."""
        self.reserved -= 1
        reservation.state = State.DONE
        sequence.blocks, reservation.blocks = reservation.blocks, []
        self.join(sequence)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; none if nothing can be done now."""
        ready = [s for s in list(self.running) if s.state is State.RUNNING and self._grow(s)]
        chunks = [Chunk(sequence, 1) for sequence in ready if sequence.remaining == 1]
        budget = self._limits.max_step_tokens - len(chunks)
        for sequence in ready:
            if sequence.remaining > 1 and budget > 0:
                chunks.append(Chunk(sequence, min(sequence.remaining, budget)))
                budget -= chunks[-1].count
        return chunks + self._admit(budget)

    def _grow(self, sequence: TokenSequence) -> bool:
        """Makes room for all tokens of the sequence, at the expense of newer ones; False if there is none."""
        missing = self._num_blocks(len(sequence.tokens)) - len(sequence.blocks)
        while missing > self._pool.available:
            victim = self._newest_since(sequence)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self._pool.allocate(missing)
        return True

    def _newest_since(self, sequence: TokenSequence) -> TokenSequence | None:
        """Who gives way to `sequence`: newer ones stand behind it and have no chunk yet; at last itself."""
        newer = self.running[self.running.index(sequence) :]
        return next((other for other in reversed(newer) if other.is_recomputable), None)

    def _preempt(self, sequence: TokenSequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._free(sequence)
        sequence.computed = sequence.stored_blocks = 0
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)

    def _admit(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self.waiting and len(self.running) + self.reserved < self._limits.max_sequences:
            item = self.waiting[0]
            if isinstance(item, BlockReservation):
                if not self._reserve(item):
                    break
            elif budget > 0 and self._start(item):
                chunks.append(Chunk(item, min(item.remaining, budget)))
                budget -= chunks[-1].count
            else:
                break
        return chunks

    def _reserve(self, reservation: BlockReservation) -> bool:
        cached = self._take(reservation, reservation.num_tokens, reservation.hashes)
        if cached is None:
            return False
        reservation.cached_blocks = cached
        reservation.granted_ids = tuple(reservation.blocks)
        reservation.state = State.RESERVED
        self.waiting.popleft()
        self.reserved += 1
        reservation.settled(None)
        return True

    def _start(self, sequence: TokenSequence) -> bool:
        # The last token is always computed: its logits are wanted, and the cache has none.
        hashes = sequence.chain.upto(sequence.tokens, len(sequence.tokens) - 1)
        cached = self._take(sequence, len(sequence.tokens), hashes)
        if cached is None:
            return False
        sequence.computed = cached * self._limits.block_tokens
        # After a preemption the count from the first time stands: it is what the request was spared.
        sequence.cached_tokens = sequence.cached_tokens if sequence.started else sequence.computed
        sequence.stored_blocks = cached
        self.waiting.popleft()
        self.join(sequence)
        if not sequence.started:
            sequence.started = time.monotonic()
            self._last_wait_seconds = sequence.queue_seconds
        return True

    def _take(self, item: TokenSequence | BlockReservation, num_tokens: int, hashes: list[bytes]) -> int | None:
        """Gives `item` blocks for its tokens, cached ones first, and says how many those are; None if there is no room.

        A block for each running sequence stays free, so that an admission is not at once followed by a preemption.
        """
        cached = self._pool.match(hashes) if self._limits.prefix_cache else []
        missing = self._num_blocks(num_tokens) - len(cached)
        if self._pool.available_beside(cached) < missing + len(self.running):
            return None
        self._pool.share(cached)
        item.blocks = cached + self._pool.allocate(missing)
        return len(cached)

    def _free(self, item: TokenSequence | BlockReservation) -> int:
        count = len(item.blocks)
        self._pool.release(item.blocks)
        item.blocks = []
        return count

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_tokens)
