"""Which block is in which tier, which one leaves next, and what is worth writing."""

from collections.abc import Sequence

from support.clock import ManualClock

from services.engines.kv_events import KvTier
from services.engines.prompt import Session
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.events import BlockMoved, BlockRemoved, BlockStored
from services.engines.pytorch.kv_cache.tiers.directory import Spill, TierDirectory, WriteRule


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


class Tiers:
    """Tiers without memory."""

    def __init__(self, directory: TierDirectory) -> None:
        self._directory = directory

    def demote(self, evicted: Sequence[tuple[int, bytes]]) -> list[bytes]:
        return [name for _, name in evicted if self._directory.place(name, may_spill=False) is None]

    def stored(self, block_hash: bytes) -> None:
        self._directory.drop(block_hash)

    def lose(self, hashes: Sequence[bytes]) -> int:
        return sum(self._directory.lose(block_hash) for block_hash in hashes)

    def leave_first(self, hashes: Sequence[bytes]) -> None:
        self._directory.leave_first(hashes)


def test_a_pool_tells_once_where_an_evicted_block_went_and_forgets_the_copy_of_what_it_gets_again() -> None:
    heard: list[object] = []
    directory = TierDirectory(1, 0, heard.append)

    pool = BlockPool(2, heard.append)
    pool.lower = Tiers(directory)
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

    pool = BlockPool(3, heard.append)
    pool.lower = Tiers(directory)
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


def test_blocks_that_another_worker_has_leave_first_and_their_end_before_their_beginning() -> None:
    directory, _ = filled(host=4, disk=0, blocks=4)
    directory.leave_first([name(2), name(3)])
    left = []
    for number in (10, 11):
        directory.place(name(number), may_spill=False)
        left.append([each for each in range(4) if name(each) not in directory])
    assert left == [[3], [2, 3]]


def test_what_one_session_has_leaves_host_memory_first_once_it_was_lent() -> None:
    directory, _ = filled(host=3, disk=0, blocks=3)
    pool = BlockPool(2)
    pool.lower = Tiers(directory)
    pool.record(Session(b"s"), [name(1), name(2)])
    pool.record(Session(b"t"), [name(1)])
    pool.lent([name(0), name(1), name(2)])
    directory.place(name(10), may_spill=False)
    assert [number for number in range(3) if name(number) in directory] == [0, 1]


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
