"""Decodes that a process has left in kept memory: of their KV only what can be vouched for is taken over."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from services.engines.journal.journal import FoundDecode, Journal
from services.engines.journal.slots import SlotShape
from services.engines.kv import KvLayout
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.kept_cache import KeptCache
from services.engines.pytorch.kv_cache.memory import HostMemory
from services.engines.seals import SEAL_BYTES

LAYOUT = KvLayout("ab" * 32, "float32", 1, 2, 1, 4, 8, 256)
BLOCKS = 40
_SIZE = LAYOUT.block_tokens
_SHAPE = SlotShape(tokens=BLOCKS * _SIZE, blocks=BLOCKS)
_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """The files of kept memory, which the next process opens again."""

    pool: int
    seals: int
    journal: int

    def open(self) -> tuple[Journal, KeptCache, HostMemory]:
        memory = HostMemory(LAYOUT, BLOCKS, os.dup(self.pool))
        cache = KeptCache(os.dup(self.seals), memory, LAYOUT)
        return Journal(os.dup(self.journal), _SHAPE, _SLOTS), cache, memory

    def leave(self, tables: Sequence[Sequence[int]], sealed: Sequence[int]) -> None:
        """Decodes with these blocks, full but for half of the last one, some of which have a seal."""
        journal, cache, memory = self.open()
        journal.begin()
        for block in range(1, BLOCKS):
            memory.write([block]).views[0][:] = bytes([block]) * LAYOUT.block_bytes
        for blocks in tables:
            ids = list(range((len(blocks) - 1) * _SIZE + _SIZE // 2 + 1))
            slot = journal.open_slot(b"request", ids)
            assert slot is not None
            slot.grant(blocks)
            slot.advance(len(ids) - 1, ids, 0)
        for block in sealed:
            cache.stored(block, block.to_bytes(16, "little"))

    def recovered(self) -> tuple[dict[int, bytes], list[FoundDecode]]:
        journal, cache, _ = self.open()
        decodes = journal.read(_SIZE, BLOCKS)
        return dict(cache.recover(decodes)), decodes

    def damage(self, block: int) -> None:
        os.pwrite(self.pool, b"\xee", block * LAYOUT.block_bytes + 5)


@pytest.fixture
def kept() -> Iterator[Kept]:
    sizes = {"pool": BLOCKS * LAYOUT.block_bytes, "seals": BLOCKS * SEAL_BYTES, "journal": _SLOTS * _SHAPE.num_bytes}
    numbers = [os.memfd_create(name) for name in sizes]
    for number, size in zip(numbers, sizes.values(), strict=True):
        os.ftruncate(number, size)
    yield Kept(*numbers)
    for number in numbers:
        os.close(number)


def _tables(decodes: Sequence[FoundDecode]) -> list[tuple[list[int], int]]:
    return sorted((one.blocks, one.computed) for one in decodes)


def test_blocks_without_a_seal_are_their_only_owners(kept: Kept) -> None:
    kept.leave([[3, 7, 5]], sealed=[3])
    found, decodes = kept.recovered()
    assert list(found) == [3]
    assert _tables(decodes) == [([3, 7, 5], 2 * _SIZE + _SIZE // 2)]
    memory = kept.open()[2]
    assert bytes(memory.read([5])[0]) == b"\x05" * LAYOUT.block_bytes
    assert bytes(memory.read([6])[0]) == bytes(LAYOUT.block_bytes)


def test_two_decodes_share_what_is_sealed_and_nothing_else(kept: Kept) -> None:
    kept.leave([[3, 4, 5], [3, 4, 6]], sealed=[3])
    assert _tables(kept.recovered()[1]) == [([3], _SIZE), ([3], _SIZE)]


def test_kv_that_is_not_what_its_seal_says_is_cut_off_with_all_after_it(kept: Kept) -> None:
    kept.leave([[3, 4, 5, 6], [3, 7]], sealed=[3, 4, 5])
    kept.damage(4)
    found, decodes = kept.recovered()
    assert sorted(found) == [3, 5]
    assert _tables(decodes) == [([3], _SIZE), ([3, 7], _SIZE + _SIZE // 2)]


def test_what_was_cut_off_stays_so_in_the_process_after_the_next(kept: Kept) -> None:
    kept.leave([[3, 4, 5]], sealed=[3, 4])
    kept.damage(4)
    kept.recovered()
    assert _tables(kept.recovered()[1]) == [([3], _SIZE)]


def test_the_seal_of_a_block_that_its_decode_still_writes_is_erased(kept: Kept) -> None:
    kept.leave([[3, 4]], sealed=[3, 4])
    found, decodes = kept.recovered()
    assert list(found) == [3]
    assert _tables(decodes) == [([3, 4], _SIZE + _SIZE // 2)]


@pytest.mark.parametrize("table", [[3, 3], [3, BLOCKS + 5], [0, 3]])
def test_a_table_that_contradicts_itself_is_not_used(kept: Kept, table: Sequence[int]) -> None:
    kept.leave([table], sealed=[])
    assert _tables(kept.recovered()[1]) == [([], 0)]


def test_a_pool_gives_no_block_of_a_decode_away(kept: Kept) -> None:
    kept.leave([[3, 4, 5], [3, 6]], sealed=[3, 9])
    found, decodes = kept.recovered()
    pool = BlockPool(BLOCKS)
    pool.adopt(found)
    for one in decodes:
        pool.claim(one.blocks)
    assert pool.used == 4
    assert set(pool.allocate(pool.available)).isdisjoint({3, 4, 5, 6})
    for one in decodes:
        pool.release(one.blocks)
    assert pool.available == 4
