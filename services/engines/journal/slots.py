"""One decode's slot in the journal: its ids, its blocks, how far its KV is computed, and the request that it runs.

A killed process leaves a prefix of its writes, so that their order is the protocol. Ids and blocks are written before
the head that counts them; blocks are counted before a step writes into them (write ahead), ids only once their step is
complete (write behind); and blocks are not counted any more before others can get them. A slot has two heads, written
in turn, each with a checksum of itself and of all that it counts: one that is torn leaves the other, which is one write
older and as true, since no block leaves a slot before both heads say so.
"""

import mmap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from zlib import crc32

RECORD_BYTES = 64 * 1024
"""The longest request that a slot takes."""

_ID_BYTES = array("I").itemsize
_HEAD = Struct("<Q10I")  # the fields of Head, then the checksum
_NOTE = Struct("<QII")
_CHECKSUM = Struct("<I")
# Places of the two heads and the two notes: each within a line of the processor's cache.
_HEADS, _NOTES, _RECORD = (0, 64), (128, 192), 256


@dataclass(frozen=True, slots=True)
class SlotShape:
    """The most ids and blocks of a slot."""

    tokens: int
    blocks: int

    @property
    def ids_at(self) -> int:
        """The place of the ids."""
        return _RECORD + RECORD_BYTES

    @property
    def blocks_at(self) -> int:
        """The place of the blocks."""
        return self.ids_at + self.tokens * _ID_BYTES

    @property
    def num_bytes(self) -> int:
        """The size of a slot: whole pages."""
        return -(-(self.blocks_at + self.blocks * _ID_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(slots=True)
class Head:
    """The state of a decode by its slot. `recoveries` counts the processes that took it over since its last new id."""

    number: int = 0  # of the writes; the larger one of two heads counts
    is_open: int = 0
    computed: int = 0
    length: int = 0
    num_blocks: int = 0
    cached_tokens: int = 0
    recoveries: int = 0
    record_bytes: int = 0
    ids_checksum: int = 0
    blocks_checksum: int = 0
    record_checksum: int = 0

    def packed(self, index: int) -> bytes:
        """Its bytes in the slot of this index."""
        body = _HEAD.pack(
            self.number,
            self.is_open,
            self.computed,
            self.length,
            self.num_blocks,
            self.cached_tokens,
            self.recoveries,
            self.record_bytes,
            self.ids_checksum,
            self.blocks_checksum,
            self.record_checksum,
        )
        return body + _CHECKSUM.pack(crc32(body, index))


@dataclass(frozen=True, slots=True)
class Content:
    """The counts of a slot: the request, all ids of prompt and answer, and the blocks in the order of the ids."""

    record: bytes
    ids: "array[int]"
    blocks: "array[int]"


class Slot:
    """A place for one decode after another. The engine's thread writes the head, the event loop the note."""

    def __init__(self, memory: mmap.mmap, shape: SlotShape, index: int) -> None:
        self.index = index
        self._memory, self._shape = memory, shape
        self._at = index * shape.num_bytes
        self._head = Head()
        self._note_number = 0
        self.is_damaged = False  # by a death during a write, or by an error, as `read` has found it

    @property
    def length(self) -> int:
        """The number of its ids."""
        return self._head.length

    # Its beginning and its end.

    def open(self, record: bytes, ids: Sequence[int]) -> bool:
        """Begins a decode. False if it does not fit."""
        if len(record) > RECORD_BYTES or len(ids) > self._shape.tokens:
            return False
        self._put(_RECORD, record)
        for _ in _NOTES:
            self.note(0, 0)
        self._head = Head(self._head.number, record_bytes=len(record), record_checksum=crc32(record))
        self._append_ids(ids)
        self._head.is_open = 1
        self._write()
        return True

    def close(self) -> None:
        """Ends it: nothing of it is taken over."""
        self._head = Head(self._head.number)
        self._write_both()

    # The engine's thread.

    def grant(self, blocks: Sequence[int]) -> None:
        """Notes the blocks after those that it has, before anything is written into them."""
        head = self._head
        if not head.is_open or len(blocks) == head.num_blocks:
            return
        if len(blocks) > self._shape.blocks:
            self.close()
            return
        new = array("I", blocks[head.num_blocks :]).tobytes()
        self._put(self._shape.blocks_at + head.num_blocks * _ID_BYTES, new)
        head.num_blocks, head.blocks_checksum = len(blocks), crc32(new, head.blocks_checksum)
        self._write()

    def revoke(self) -> None:
        """Notes that it has no blocks any more, before others can get them."""
        head = self._head
        if head.num_blocks:
            head.num_blocks = head.computed = head.blocks_checksum = 0
            self._write_both()

    def advance(self, computed: int, ids: Sequence[int], cached_tokens: int) -> None:
        """Notes all ids, and for how many of them the KV is in the blocks, once it is; so many came from a cache."""
        head = self._head
        if not head.is_open:
            return
        if len(ids) > self._shape.tokens:
            self.close()
            return
        if len(ids) > head.length:
            self._append_ids(ids[head.length :])
            head.recoveries = 0
        head.computed, head.cached_tokens = computed, cached_tokens
        self._write()

    # The event loop.

    def note(self, attempt: int, attachment: int) -> None:
        """Notes the decode's last reader."""
        self._note_number += 1
        body = _NOTE.pack(self._note_number, attempt, attachment)
        self._put(_NOTES[self._note_number % 2], body + _CHECKSUM.pack(crc32(body, self.index)))

    # A process that takes it over.

    def read(self) -> Content | None:
        """The counts of its newest whole head; None if it is not open, or was damaged, and of no use."""
        heads = [self._read_head(at) for at in _HEADS]
        self._note_number = max(self._read_note(at)[0] for at in _NOTES)
        self.is_damaged = not all(head.number for head in heads)
        for head in sorted(heads, key=lambda head: -head.number):
            content = self._content(head) if head.is_open else None
            if content is not None or (head.number and not head.is_open):
                self._head = head
                return content
            self.is_damaged |= head.is_open > 0
        return None

    @property
    def head(self) -> Head:
        """The head that `read` went by."""
        return self._head

    @property
    def last_reader(self) -> tuple[int, int]:
        """The last reader's attempt and attachment."""
        return max(self._read_note(at) for at in _NOTES)[1:]

    def take_over(self, blocks: Sequence[int], computed: int) -> None:
        """Goes on in this process with the first of its blocks, the only ones that it still has."""
        head = self._head
        head.num_blocks, head.blocks_checksum = len(blocks), crc32(array("I", blocks).tobytes())
        head.computed, head.recoveries = computed, head.recoveries + 1
        self._write_both()

    def _content(self, head: Head) -> Content | None:
        """The counts of a head; None if it is not as it was written. Without its blocks the ids stand."""
        shape = self._shape
        if head.record_bytes > RECORD_BYTES or head.length > shape.tokens or head.num_blocks > shape.blocks:
            return None
        record = self._get(_RECORD, head.record_bytes)
        ids = self._get(shape.ids_at, head.length * _ID_BYTES)
        blocks = self._get(shape.blocks_at, head.num_blocks * _ID_BYTES)
        if crc32(record) != head.record_checksum or crc32(ids) != head.ids_checksum:
            return None
        if crc32(blocks) != head.blocks_checksum:
            self.is_damaged, blocks = True, b""
        return Content(record, array("I", ids), array("I", blocks))

    def _read_head(self, at: int) -> Head:
        data = self._get(at, _HEAD.size + _CHECKSUM.size)
        body, checksum = data[: _HEAD.size], data[_HEAD.size :]
        return Head(*_HEAD.unpack(body)) if _CHECKSUM.pack(crc32(body, self.index)) == checksum else Head()

    def _read_note(self, at: int) -> tuple[int, int, int]:
        data = self._get(at, _NOTE.size + _CHECKSUM.size)
        body, checksum = data[: _NOTE.size], data[_NOTE.size :]
        number, attempt, attachment = _NOTE.unpack(body)
        is_whole = _CHECKSUM.pack(crc32(body, self.index)) == checksum
        return (number, attempt, attachment) if is_whole else (0, 0, 0)

    def _append_ids(self, ids: Sequence[int]) -> None:
        head, new = self._head, array("I", ids).tobytes()
        self._put(self._shape.ids_at + head.length * _ID_BYTES, new)
        head.length, head.ids_checksum = head.length + len(ids), crc32(new, head.ids_checksum)

    def _write_both(self) -> None:
        self._write()
        self._write()

    def _write(self) -> None:
        self._head.number += 1
        self._put(_HEADS[self._head.number % 2], self._head.packed(self.index))

    def _put(self, at: int, data: bytes) -> None:
        start = self._at + at
        self._memory[start : start + len(data)] = data

    def _get(self, at: int, size: int) -> bytes:
        return self._memory[self._at + at : self._at + at + size]
