"""The simulated engine with kept memory: pool, seals and journal outlive its process, by the product's own classes.

Its KV of a block is one hash of all tokens in it, so that the last block of a journaled answer is written anew with
each of its tokens.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from random import Random
from typing import Any, ClassVar

import torch

import services.engines.simulated.engine
import services.engines.simulated.ranks
import services.worker_engines
from services.engines.journal.journal import FoundDecode, Journal, RecoveredDecode
from services.engines.journal.slots import Slot, SlotShape
from services.engines.memory.allocation import AllocationRules, KeptBlocks
from services.engines.memory.shared_pool import SharedPool, gaps
from services.engines.pytorch import parts
from services.engines.pytorch.kv_cache.digester import Digests
from services.engines.pytorch.kv_cache.kept_cache import KeptCache, KeptPool, KeptShape
from services.engines.registry import open_engine
from services.engines.seals import host_digests
from services.engines.simulated.blocks import Blocks, Contents
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine, _SteppedStream
from services.engines.simulated.kv import Claim, SimulatedReservation
from services.engines.simulated.scheduler import SimulatedScheduler
from services.engines.simulated.sequence import Sequence
from services.engines.simulated.tokens import kv_layout
from simulation.loop import NODE, Node


class KeptConfig(SimulatedConfig):
    """That of an engine whose memory can be kept. It has no weights."""

    slots: int = 64

    def why_not_kept(self, *, weights: bool, kv: bool) -> str:
        del weights, kv
        return ""


class KeptPages(SharedPool):
    """A pool in a file that outlives the process, which it closes."""

    digests_beside_steps = False

    def __init__(self, kept: int, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._file = kept
        self._mapping = mmap.mmap(kept, num_blocks * block_bytes)
        self._bytes = memoryview(self._mapping)

    def digest(self, block_ids: Items[int]) -> list[int]:
        """The digests of blocks."""
        return host_digests(self, block_ids)

    def begin_digest(self, block_ids: Items[int]) -> Digests:
        """The digests of blocks, at once."""
        return Digests(torch.tensor(self.digest(block_ids), dtype=torch.uint64))

    def clear_all_but(self, blocks: Collection[int]) -> None:
        """Zeroes all other blocks."""
        for block, count in gaps(blocks, self.num_blocks):
            start, end = block * self.block_bytes, (block + count) * self.block_bytes
            self._bytes[start:end] = bytes(end - start)


class JournaledSequence(Sequence):
    """A sequence that notes its blocks and ids in a slot, if it has one."""

    slot: Slot | None = None

    def grow(self) -> int:
        token_id = super().grow()
        self.journal()
        return token_id

    def report_computed(self) -> None:
        super().report_computed()
        self.journal()

    def journal(self) -> None:
        """A step has come to its end, and nobody was told of its ids yet."""
        if self.slot is not None:
            self.slot.advance(self.computed, self.ids, self.cached_tokens or 0)

    def leave_journal(self) -> None:
        """The next process does not go on with it."""
        if self.slot is not None:
            self.slot.close()
            self.slot = None


class JournaledScheduler(SimulatedScheduler):
    """Blocks are in a slot before a step writes into them, and leave it before others can get them."""

    async def _spend(self, batch: Items[tuple[Any, int]]) -> None:
        for sequence, _ in batch:
            if sequence.slot is not None:
                sequence.slot.grant(sequence.blocks)
        await super()._spend(batch)

    def _free(self, item: Any) -> None:
        if isinstance(item, JournaledSequence) and item.slot is not None:
            item.slot.revoke()
        super()._free(item)

    def _hold(self, sequence: Any) -> None:
        sequence.leave_journal()
        super()._hold(sequence)

    def _end_without_kv(self, sequence: Any) -> None:
        sequence.leave_journal()
        super()._end_without_kv(sequence)


class JournaledContents(Contents):
    """Writes the last block of a journaled answer, too."""

    def write(self, sequence: Any, before: int) -> None:
        super().write(sequence, before)
        index, rest = divmod(sequence.computed, self._block_tokens)
        if rest and sequence.slot is not None and not sequence.held:
            content = self._bytes(sequence.content_hash(index, sequence.computed))
            self._memory.block(sequence.blocks[index])[:] = content


class SealedBlocks(Blocks):
    """Blocks whose seals are in kept memory. It is the pool that the product's recovery is told of."""

    record_of_cache: KeptCache | None = None

    def register(self, block_id: int, block_hash: bytes) -> None:
        is_new = block_hash not in self._by_hash and self._hashes[block_id] is None
        super().register(block_id, block_hash)
        if is_new and self.record_of_cache is not None:
            self.record_of_cache.stored(block_id, block_hash)

    def _evict(self) -> int:
        block_id = super()._evict()
        if self.record_of_cache is not None:
            self.record_of_cache.erased(block_id)
        return block_id

    def leave_out_first(self) -> None:
        """The place of the first block's seal has the epoch."""
        self._free.remove(0)
        del self._references[0], self._hashes[0]
        self.total -= 1

    def adopt(self, contents: Mapping[int, bytes]) -> None:
        """Takes blocks of an earlier process into the cache, the first to be evicted first."""
        for block_id, block_hash in contents.items():
            self._free.remove(block_id)
            super().register(block_id, block_hash)
            self._evictable[block_id] = None

    def claim(self, block_ids: Items[int]) -> None:
        """Adds a reference to each of these blocks, which decodes of an earlier process have left."""
        for block_id in block_ids:
            if not self._references[block_id] and self._evictable.pop(block_id, 0) == 0:
                self._free.remove(block_id)
            self._references[block_id] += 1


class KeptEngine(SimulatedEngine):
    """A SimulatedEngine of one rank, whose keeper holds its memory."""

    end_here: ClassVar[Callable[[Node], None]]  # of the world: kills a process
    got: ClassVar[Callable[["KeptEngine", str, KeptPool], None]]  # told of what one has got or made
    opened: ClassVar[Callable[["KeptEngine"], None]]  # told of each that has taken over

    def __init__(self, config: KeptConfig, rules: AllocationRules, keeper: Any) -> None:
        super().__init__(config, rules)
        self._keeper, self._slots = keeper, config.slots
        self._decodes: list[FoundDecode] = []
        self.kept: KeptPool
        self.is_closed = False
        self.node = NODE.get()

    async def __aenter__(self) -> "KeptEngine":
        loop, config = asyncio.get_running_loop(), self._config
        layout = kv_layout(config, self._vocabulary)
        slot = SlotShape(config.context_tokens, config.num_blocks)
        shape = KeptShape(layout, config.num_blocks, slot, self._slots)
        form = f"{layout.digest} {config.num_blocks} {self._slots}"
        self.kept = found = await loop.run_in_executor(None, self._get, form, shape)
        self.files = [os.fstat(each).st_ino for each in (found.pool, found.seals, found.journal)]
        await super().__aenter__()
        self._recover(shape)
        return self

    def _get(self, form: str, shape: KeptShape) -> KeptPool:
        found = KeptPool.find(self._keeper, form)
        if found is None:
            found = KeptPool.create(self._keeper, form, shape, torch.device("cpu"))
        KeptEngine.got(self, form, found)
        return found

    def close_pages(self) -> None:
        """Unmaps its pool, to which nothing else refers yet."""
        pages = getattr(self, "_memory", None)
        if pages is not None:
            pages._bytes.release()
            pages._mapping.close()

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        self._close_records()

    def _close_records(self) -> None:
        [rank] = self._ranks.all
        blocks: Any = rank.blocks
        assert self.journal is not None
        self.journal._memory.close()
        blocks.record_of_cache._seals.close()
        self.is_closed = True

    def _open_memory(self) -> SharedPool:
        return KeptPages(self.kept.pool, self._config.num_blocks, self._config.block_bytes)

    def _recover(self, shape: KeptShape) -> None:
        [rank] = self._ranks.all
        blocks: Any = rank.blocks
        blocks.leave_out_first()
        rank.scheduler._kept = KeptBlocks(blocks.total, self._rules)
        memory: Any = self._memory
        self.recovered = parts._recover(blocks, memory, shape, self.kept)
        self._decodes = list(self.recovered.decodes)
        KeptEngine.opened(self)

    @property
    def journal(self) -> Journal | None:
        return self.recovered.journal

    def end_process(self) -> None:
        node = NODE.get()
        assert node is not None
        KeptEngine.end_here(node)

    def pop_recovered(self) -> Items[RecoveredDecode]:
        decodes, self._decodes = self._decodes, []
        return [RecoveredDecode(one.slot, one.record, one.ids, self._reservation(one)) for one in decodes]

    def _reservation(self, left: FoundDecode) -> SimulatedReservation | None:
        if not left.blocks:
            return None
        [rank] = self._ranks.all
        claim = Claim(len(left.blocks), [], list(left.blocks), min(left.cached_tokens, left.computed) // 16)
        return SimulatedReservation(claim, left.computed, rank.scheduler.release, rank.contents.register)

    # Of a world: the death of its process.

    def die(self, random: Random, damage: float) -> None:
        """Leaves what a process leaves that was killed amid a step: anything in blocks that nothing vouches for, and
        of some seeds damage in those that have a seal.
        """
        if self.is_closed:
            return
        [rank] = self._ranks.all
        blocks: Any = rank.blocks
        scheduler, size = rank.scheduler, self._config.block_tokens
        vouched = {block for block, name in blocks._hashes.items() if name is not None}
        for sequence in scheduler.running:
            if sequence.slot is not None:  # type: ignore[attr-defined]  # JournaledSequence
                vouched.update(sequence.blocks[: -(-sequence.computed // size)])
        written = {block for sequence in scheduler.running for block in sequence.blocks} - vouched
        for block in sorted(written):
            self._memory.block(block)[:] = random.randbytes(self._config.block_bytes)
        self._damage(random, damage)
        # The mapping of the pool stays, as long as readers have it.
        os.close(self.memory.file_descriptor)
        self._close_records()

    def _damage(self, random: Random, damage: float) -> None:
        [rank] = self._ranks.all
        blocks = rank.blocks
        sealed = [block for block, name in blocks._hashes.items() if name is not None]
        for block in sealed if random.random() < damage else ():
            if random.random() < damage:
                self._memory.block(block)[:1] = bytes([self._memory.block(block)[0] ^ 1])


def _outlive(stream: _SteppedStream, slot: Slot) -> None:
    stream._sequence.slot = slot  # type: ignore[attr-defined]


def install() -> None:
    """Has the simulated engines of this process journaled, and those with a keeper kept."""

    def opening(config: Any, context: Any) -> Any:
        if context.kept is None or not context.kept.kv:
            return open_engine(config, context)
        return KeptEngine(config, context.allocation, context.kept.keeper)

    services.worker_engines.open_engine = opening  # type: ignore[assignment]
    services.engines.simulated.engine.Sequence = JournaledSequence  # type: ignore[misc]
    ranks: Any = services.engines.simulated.ranks
    ranks.Blocks, ranks.Contents, ranks.SimulatedScheduler = SealedBlocks, JournaledContents, JournaledScheduler
    _SteppedStream.outlive = _outlive  # type: ignore[method-assign]
