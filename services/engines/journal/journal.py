"""The slots of all running decodes: opened for new ones, and read again by the next process of the worker."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.engines.journal.slots import Slot, SlotShape
from services.engines.kv import Reservation

# A decode that two processes have died with, without a new id between, is not taken over again: it may be the cause.
_MOST_RECOVERIES = 2


@dataclass(slots=True)
class FoundDecode:
    """A decode of an earlier process: its request, its ids, and its KV: the first `computed` ids' is in `blocks`."""

    slot: Slot
    record: bytes
    ids: Sequence[int]
    blocks: list[int]
    computed: int
    cached_tokens: int

    @property
    def kv(self) -> Literal["whole", "cut", "ids"]:
        """The KV that it has: that of all ids but the last, which never was computed; of some; or of none."""
        if not self.blocks:
            return "ids"
        return "whole" if self.computed == len(self.ids) - 1 else "cut"


@dataclass(frozen=True, slots=True)
class RecoveredDecode:
    """A decode that the worker's last process has left: its request, all ids of its prompt and its answer so far.

    The KV of the first ones is in the reservation; None if all of it has to be computed again.
    """

    slot: Slot
    record: bytes
    ids: Sequence[int]
    reservation: Reservation | None


class Journal:
    """Owns a file of `num_slots` slots, which it closes. It has none before `begin` or `read`.

    Opening and freeing slots is the event loop's.
    """

    def __init__(self, descriptor: int, shape: SlotShape, num_slots: int) -> None:
        self._shape = shape
        self._memory = mmap.mmap(descriptor, num_slots * shape.num_bytes)
        os.close(descriptor)
        self._num_slots = num_slots
        self._free: list[Slot] = []
        self.damaged = 0  # slots of which `read` has found a part that is not what was written

    def begin(self) -> None:
        """Begins in a new file: of a slot that says nothing it is known then that it was damaged."""
        for index in range(self._num_slots):
            self._free.append(Slot(self._memory, self._shape, index))
            self._free[-1].close()

    @property
    def has_room(self) -> bool:
        """True if a slot is free."""
        return bool(self._free)

    def open_slot(self, record: bytes, ids: Sequence[int]) -> Slot | None:
        """A slot for a new decode; None if none is free, or if it does not fit."""
        if not self._free or not self._free[-1].open(record, ids):
            return None
        return self._free.pop()

    def free_slot(self, slot: Slot) -> None:
        """Ends a slot, once. The engine must have ended its decode."""
        slot.close()
        self._free.append(slot)

    def read(self, block_tokens: int, num_blocks: int) -> list[FoundDecode]:
        """The decodes of an earlier process, with the part of their KV that the journal vouches for.

        Their slots stay open. All others are freed, and what was in them is zeroed.
        """
        found, size = [], self._shape.num_bytes
        for index in range(self._num_slots):
            slot = Slot(self._memory, self._shape, index)
            decode = _decode(slot, block_tokens, num_blocks)
            self.damaged += slot.is_damaged
            if decode is None:
                self._memory.madvise(mmap.MADV_REMOVE, index * size, size)
                self._free.append(Slot(self._memory, self._shape, index))
                self._free[-1].close()
            else:
                found.append(decode)
        return found


def _decode(slot: Slot, block_tokens: int, num_blocks: int) -> FoundDecode | None:
    content = slot.read()
    if content is None or not content.ids or slot.head.recoveries >= _MOST_RECOVERIES:
        return None
    blocks = content.blocks.tolist()
    if len(set(blocks)) < len(blocks) or any(not 0 < block < num_blocks for block in blocks):
        blocks = []
    # The last id's KV is never there: it is the next one to be computed.
    computed = min(slot.head.computed, len(content.ids) - 1, len(blocks) * block_tokens)
    blocks = blocks[: -(-computed // block_tokens)]
    return FoundDecode(slot, content.record, content.ids.tolist(), blocks, computed, slot.head.cached_tokens)
