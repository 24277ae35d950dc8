"""Which block is in which tier and slot, and which one leaves next. It needs no memory and no threads.

The rule of writing to the disk: only while it is read.
"""

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import itemgetter
from typing import NamedTuple

from services.engines.kv_events import KvTier
from services.engines.pytorch.kv_cache.events import BlockMoved, BlockRemoved
from services.engines.seals import BlockContents

Clock = Callable[[], float]
_NAME = itemgetter(0)

_HOUR_SECONDS = 3600.0
# The disk is written while at least this share of what was written is read.
_LEAST_READ_SHARE = 0.05
# So many writes in an hour say something; before, all are made.
_ENOUGH_WRITES = 256
# Of the writes that are not worth it one in so many is made, to notice when they are again.
_TRIAL = 20


class WriteRule:
    """Says whether a block should be written to the disk: while enough of what was written is read, over an hour."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._writes = self._reads = 0.0
        self._refused = 0

    def may_write(self) -> bool:
        """True if the next block should be written; one in 20 is in any case."""
        self._decay()
        if self._writes < _ENOUGH_WRITES or self._reads >= _LEAST_READ_SHARE * self._writes:
            return True
        self._refused += 1
        return self._refused % _TRIAL == 0

    def wrote(self) -> None:
        """Counts a block that was written."""
        self._decay()
        self._writes += 1

    def read(self, blocks: int) -> None:
        """Counts blocks that were read."""
        self._decay()
        self._reads += blocks

    def _decay(self) -> None:
        now = self._clock()
        left = math.exp((self._at - now) / _HOUR_SECONDS)
        self._writes, self._reads, self._at = self._writes * left, self._reads * left, now


TierListener = Callable[[BlockMoved | BlockRemoved], None]


@dataclass(frozen=True, slots=True)
class Spill:
    """A block that goes from host memory to the disk, before its slot in host memory is written again."""

    block_hash: bytes
    host_slot: int
    disk_slot: int


@dataclass(frozen=True, slots=True)
class Placed:
    """The slot in host memory of a block that leaves the pool, and the block that it replaces, if that is kept."""

    slot: int
    spill: Spill | None


class Place(NamedTuple):
    """A block's tier and its slot there."""

    tier: KvTier
    slot: int


class _Slots:
    """The slots of a tier, and its blocks, the least recently used first."""

    def __init__(self, count: int) -> None:
        self.total = count
        self.free = list(range(count - 1, -1, -1))
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()

    @property
    def is_full(self) -> bool:
        return not self.free


class TierDirectory:
    """The blocks below the pool. Each is in one tier; the least recently used leaves a full one first.

    A prefix enters with its end first, as the pool evicts it, so its end also leaves first.
    """

    def __init__(self, host_slots: int, disk_slots: int, listener: TierListener, clock: Clock = time.monotonic) -> None:
        self._host = _Slots(host_slots)
        self._disk = _Slots(disk_slots)
        self._listener = listener
        self.write_rule = WriteRule(clock)
        # Of blocks on their way to the disk, the writes that have not ended: one may be lost and come again meanwhile.
        self.unwritten: Counter[bytes] = Counter()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._host.slot_of or block_hash in self._disk.slot_of

    def place(self, block_hash: bytes, *, may_spill: bool) -> Placed | None:
        """Finds a slot in host memory for a block that leaves the pool; None if the tier is closed or all of it is
        being read. `may_spill` says whether the disk can take the block that this one replaces.
        """
        spill = self._make_room(may_spill) if self._host.is_full else None
        if self._host.is_full:
            return None
        slot = self._host.free.pop()
        self._host.slot_of[block_hash] = slot
        self._listener(BlockMoved(block_hash, KvTier.HOST))
        return Placed(slot, spill)

    def following(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Returns how many of the first blocks of a chain are in host memory, and how many after them on the disk."""
        host = _leading(self._host.slot_of, hashes)
        rest = hashes[host:] if self._disk.slot_of else ()
        disk = sum(1 for _ in takewhile(self._is_written, rest))
        return host, disk

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Lets blocks of a chain leave after all others, which are about to be read."""
        for _, slots in self._tiers():
            deque(map(slots.slot_of.move_to_end, filter(slots.slot_of.__contains__, reversed(hashes))), 0)

    def leave_first(self, hashes: Sequence[bytes]) -> None:
        """Lets blocks of a chain leave before all others, the end of the chain first."""
        for _, slots in self._tiers():
            for block_hash in hashes:
                if block_hash in slots.slot_of:
                    slots.slot_of.move_to_end(block_hash, last=False)

    def readable(self, contents: Sequence[BlockContents]) -> Sequence[BlockContents]:
        """Returns the first of these blocks that are here, and not still on their way to the disk."""
        names = list(map(_NAME, contents))
        there = 0 if self.unwritten else _leading(self._host.slot_of, names)
        host, disk, unwritten = self._host.slot_of, self._disk.slot_of, self.unwritten
        for count, name in enumerate(islice(names, there, None), there):
            if (name not in host and name not in disk) or name in unwritten:
                return contents[:count]
        return contents

    def place_of(self, block_hash: bytes) -> Place | None:
        """Returns where a block is."""
        for tier, slots in self._tiers():
            slot = slots.slot_of.get(block_hash)
            if slot is not None:
                return Place(tier, slot)
        return None

    def take(self, block_hash: bytes) -> Place:
        """Takes a block out, which must be here, to read it. Its slot stays its own until `free` or `put_back`."""
        place = self.place_of(block_hash)
        assert place is not None
        del self._slots(place.tier).slot_of[block_hash]
        return place

    def put_back(self, block_hash: bytes, place: Place) -> None:
        """Puts a block back that was taken, and that the pool has not got after all."""
        slots = self._slots(place.tier)
        if block_hash in self:
            self.free(place)
            return
        if not slots.total:
            self._listener(BlockRemoved(block_hash))
            return
        slots.slot_of[block_hash] = place.slot
        self._listener(BlockMoved(block_hash, place.tier))

    def free(self, place: Place) -> None:
        """Frees the slot of a block that was taken."""
        slots = self._slots(place.tier)
        if slots.total:
            slots.free.append(place.slot)

    def drop(self, block_hash: bytes) -> bool:
        """Forgets a block, if it is here, without a report."""
        for _, slots in self._tiers():
            slot = slots.slot_of.pop(block_hash, None)
            if slot is not None:
                slots.free.append(slot)
                return True
        return False

    def lose(self, block_hash: bytes) -> bool:
        """Forgets a block, if it is here, and reports it."""
        if not self.drop(block_hash):
            return False
        self._listener(BlockRemoved(block_hash))
        return True

    def close(self, tier: KvTier) -> None:
        """Takes a tier out of use, with all its blocks."""
        slots = self._slots(tier)
        for block_hash in list(slots.slot_of):
            self.lose(block_hash)
        slots.total = 0
        slots.free.clear()

    def total(self, tier: KvTier) -> int:
        """The slots of a tier; 0 if it is out of use."""
        return self._slots(tier).total

    def used(self, tier: KvTier) -> int:
        """The blocks in a tier."""
        return len(self._slots(tier).slot_of)

    def _make_room(self, may_spill: bool) -> Spill | None:
        """Evicts a block from host memory; returns its way to the disk if it is worth writing."""
        if not self._host.slot_of:
            return None
        block_hash, host_slot = self._host.slot_of.popitem(last=False)
        self._host.free.append(host_slot)
        if not (self._disk.total and may_spill and self.write_rule.may_write()):
            self._listener(BlockRemoved(block_hash))
            return None
        if self._disk.is_full and self._disk.slot_of:
            self.lose(next(iter(self._disk.slot_of)))
        if self._disk.is_full:
            self._listener(BlockRemoved(block_hash))
            return None
        disk_slot = self._disk.free.pop()
        self._disk.slot_of[block_hash] = disk_slot
        self.write_rule.wrote()
        self._listener(BlockMoved(block_hash, KvTier.DISK))
        return Spill(block_hash, host_slot, disk_slot)

    def _is_written(self, block_hash: bytes) -> bool:
        return block_hash in self._disk.slot_of and block_hash not in self.unwritten

    def _slots(self, tier: KvTier) -> _Slots:
        return self._host if tier is KvTier.HOST else self._disk

    def _tiers(self) -> tuple[tuple[KvTier, _Slots], ...]:
        return (KvTier.HOST, self._host), (KvTier.DISK, self._disk)


def _leading(known: Mapping[bytes, int], hashes: Sequence[bytes]) -> int:
    """Returns how many of the first hashes are known. A prefix may have thousands, so that no Python runs for each."""
    return len(list(takewhile(known.__contains__, hashes)))


def count_off(counts: Counter[bytes], block_hash: bytes) -> None:
    """Counts one less of a block; a block of which none are left is not in `counts`."""
    counts[block_hash] -= 1
    if counts[block_hash] <= 0:
        del counts[block_hash]
