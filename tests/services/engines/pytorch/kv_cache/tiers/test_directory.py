"""Which block is in which tier, which one leaves next, and what is worth loading and writing."""

from collections.abc import Sequence

import pytest
from support.clock import ManualClock

from services.engines.kv_events import KvTier
from services.engines.prompt import Session
from services.engines.pytorch.kv_cache.blocks import BlockMoved, BlockPool, BlockRemoved, BlockStored
from services.engines.pytorch.kv_cache.tiers.directory import Spill, TierDirectory, WriteRule
from services.engines.pytorch.kv_cache.tiers.jobs import Rates


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def filled(host: int, disk: int, blocks: int) -> tuple[TierDirectory, list[object]]:
    """A directory into which blocks 0, 1, ... were placed, and what it has told."""
    heard: list[object] = []
    directory = TierDirectory(host, disk, heard.append, ManualClock())
    for number in range(blocks):
        assert directory.place(name(number), may_spill=True) is not None
    return directory, heard


def test_the_least_recently_placed_block_is_lost_without_a_disk() -> None:
    directory, heard = filled(host=2, disk=0, blocks=3)
    assert heard[-2:] == [BlockRemoved(name(0)), BlockMoved(name(2), KvTier.HOST)]
    assert name(0) not in directory
    assert directory.following([name(1), name(2)]) == (2, 0)


def test_with_a_disk_it_goes_there_and_the_oldest_there_is_lost() -> None:
    directory, heard = filled(host=1, disk=2, blocks=4)
    assert [event for event in heard if isinstance(event, BlockRemoved)] == [BlockRemoved(name(0))]
    assert directory.following([name(3), name(2), name(1), name(0)]) == (1, 2)
    assert (directory.used(KvTier.HOST), directory.used(KvTier.DISK)) == (1, 2)


def test_a_spilled_block_leaves_the_slot_that_the_new_one_gets() -> None:
    directory, _ = filled(host=1, disk=1, blocks=1)
    placed = directory.place(name(1), may_spill=True)
    assert placed is not None
    assert placed.spill == Spill(name(0), placed.slot, 0)


def test_a_block_that_is_being_read_keeps_its_slot() -> None:
    directory, _ = filled(host=1, disk=0, blocks=1)
    place = directory.take(name(0))
    assert directory.place(name(1), may_spill=True) is None
    directory.put_back(name(0), place)
    assert directory.following([name(0)]) == (1, 0)
    directory.free(directory.take(name(0)))
    assert directory.place(name(1), may_spill=True) is not None


def test_a_closed_tier_loses_its_blocks_and_takes_no_more() -> None:
    directory, heard = filled(host=2, disk=0, blocks=2)
    place = directory.take(name(0))
    directory.close(KvTier.HOST)
    assert heard[-1] == BlockRemoved(name(1))
    directory.free(place)
    assert directory.place(name(2), may_spill=True) is None
    assert directory.total(KvTier.HOST) == 0


def test_a_pool_tells_once_where_an_evicted_block_went_and_forgets_the_copy_of_what_it_gets_again() -> None:
    heard: list[object] = []
    directory = TierDirectory(1, 0, heard.append)

    class Tiers:
        def demote(self, evicted: Sequence[tuple[int, bytes]]) -> list[bytes]:
            return [name for _, name in evicted if directory.place(name, may_spill=False) is None]

        def stored(self, block_hash: bytes) -> None:
            directory.drop(block_hash)

        def lose(self, hashes: Sequence[bytes]) -> int:
            return sum(directory.lose(block_hash) for block_hash in hashes)

    pool = BlockPool(2, heard.append)
    pool.lower = Tiers()
    [block] = pool.allocate(1)
    pool.store(block, name(1))
    pool.release([block])
    [block] = pool.allocate(1)
    assert heard == [BlockStored(name(1)), BlockMoved(name(1), KvTier.HOST)]
    pool.store(block, name(1))
    assert heard[-1] == BlockStored(name(1))
    assert name(1) not in directory


def test_an_ended_session_s_blocks_leave_the_tiers_and_do_not_go_down() -> None:
    heard: list[object] = []
    directory = TierDirectory(4, 0, heard.append)

    class Tiers:
        def demote(self, evicted: Sequence[tuple[int, bytes]]) -> list[bytes]:
            return [name for _, name in evicted if directory.place(name, may_spill=False) is None]

        def stored(self, block_hash: bytes) -> None:
            directory.drop(block_hash)

        def lose(self, hashes: Sequence[bytes]) -> int:
            return sum(directory.lose(block_hash) for block_hash in hashes)

    pool = BlockPool(3, heard.append)
    pool.lower = Tiers()
    blocks = pool.allocate(2)
    for block, number in zip(blocks, (1, 2), strict=True):
        pool.store(block, name(number))
    pool.release(blocks)
    pool.record(Session(b"s"), [name(1), name(2)])
    pool.release(pool.allocate(1))  # block 2, the end of the prefix, goes down
    assert name(2) in directory
    assert pool.end_session(b"s") == 2
    assert name(2) not in directory
    pool.allocate(2)
    assert name(1) not in directory
    assert heard[-1] == BlockRemoved(name(1))


def test_a_disk_that_is_not_read_gets_one_block_in_twenty() -> None:
    clock = ManualClock()
    rule = WriteRule(clock)
    for _ in range(256):
        assert rule.may_write()
        rule.wrote()
    assert sum(rule.may_write() for _ in range(200)) == 10
    rule.read(13)
    assert rule.may_write()
    clock.advance(6 * 3600.0)
    for _ in range(256):
        rule.wrote()
    assert not rule.may_write()


def test_what_is_sooner_computed_is_not_loaded() -> None:
    rates = Rates(block_bytes=1 << 20, block_tokens=16)
    assert rates.worth_loading(host=10, disk=10) == 20  # nothing is measured yet
    rates.computed(tokens=1600, seconds=1.0)  # 10 ms a block
    rates.loaded(KvTier.HOST, blocks=100, seconds=0.1)
    for _ in range(3):
        rates.loaded(KvTier.DISK, blocks=100, seconds=10.0)
    assert rates.worth_loading(host=10, disk=10) == 10
    rates.loaded(KvTier.DISK, blocks=100, seconds=0.1)
    assert rates.worth_loading(host=10, disk=0) == 10
    for _ in range(20):
        rates.loaded(KvTier.DISK, blocks=100, seconds=0.1)
        rates.loaded(KvTier.HOST, blocks=100, seconds=100.0)
    assert rates.worth_loading(host=10, disk=0) == 0
    assert 0.1 <= rates.patience_seconds(10) <= 0.11


def test_one_load_that_was_held_up_does_not_end_loads_for_good() -> None:
    rates = Rates(block_bytes=1 << 20, block_tokens=16)
    rates.computed(1000, 0.1)
    rates.loaded(KvTier.HOST, 1, 5.0)
    assert rates.worth_loading(10, 0) == 0
    for _ in range(100):
        if rates.worth_loading(10, 0):
            rates.loaded(KvTier.HOST, 10, 0.004)
    assert rates.worth_loading(10, 0) == 10


def _of_a_gpu(load_seconds: float = 0.012) -> Rates:
    """An 8B model: 500 tokens take 14.3 ms, of which any prompt takes 5, and 63 blocks of 4 MiB 5 ms more to load."""
    rates = Rates(4 << 20, 32, step_seconds=0.005, load_seconds=load_seconds)
    for _ in range(4):
        rates.computed(500, 0.0143)
        rates.computed(2000, 0.057)
        rates.computed(32_000, 1.77)
        rates.resumed(KvTier.HOST, blocks=999, tokens=32, seconds=0.005 + 0.012 + 999 * 8e-5)
    return rates


def test_what_any_load_takes_makes_short_prompts_sooner_computed() -> None:
    rates = _of_a_gpu()
    assert rates.worth_loading(host=15, disk=0) == 0
    assert rates.worth_loading(host=62, disk=0) == 62
    assert rates.worth_loading(host=999, disk=0) == 999


def test_what_any_load_takes_is_measured_by_short_loads() -> None:
    rates = _of_a_gpu(load_seconds=0.001)
    assert rates.worth_loading(host=15, disk=0) == 15
    for _ in range(3):
        rates.resumed(KvTier.HOST, blocks=15, tokens=20, seconds=0.018)
    assert rates.worth_loading(host=15, disk=0) == 0
    assert rates.worth_loading(host=999, disk=0) == 999


@pytest.mark.parametrize("blocks", [1, 4, 15])
def test_trials_take_little_of_the_time_to_compute(blocks: int) -> None:
    rates = _of_a_gpu()
    computing = trials = 0.0
    for _ in range(3000):
        computing += 0.005 + (rates.compute_seconds(blocks) or 0.0)
        trials += rates.load_seconds(KvTier.HOST, rates.worth_loading(host=blocks, disk=0))
    assert 0 < trials <= 0.02 * computing
