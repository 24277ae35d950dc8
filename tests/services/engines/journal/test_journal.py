"""The journal of running decodes: what the next process reads is what was written, or an error that is found."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from services.engines.journal.journal import FoundDecode, Journal
from services.engines.journal.slots import RECORD_BYTES, Slot, SlotShape

_BLOCK_TOKENS, _NUM_BLOCKS, _NUM_SLOTS = 4, 200, 8
_SHAPE = SlotShape(tokens=64, blocks=20)
_SIZE = _NUM_SLOTS * _SHAPE.num_bytes


@dataclass(frozen=True, slots=True)
class State:
    """The content of a slot after one of its writes."""

    record: bytes
    ids: tuple[int, ...]
    blocks: tuple[int, ...]
    computed: int


@dataclass(slots=True)
class Decode:
    """A decode as its engine has it, and all that was written of it."""

    slot: Slot
    state: State
    history: list[State] = field(default_factory=list)

    def note(self, state: State) -> None:
        self.state = state
        self.history.append(state)


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = os.memfd_create("journal")
    os.ftruncate(number, _SIZE)
    yield number
    os.close(number)


def _journal(descriptor: int) -> Journal:
    """That of a first process."""
    journal = Journal(os.dup(descriptor), _SHAPE, _NUM_SLOTS)
    journal.begin()
    return journal


def _read(descriptor: int) -> tuple[Journal, list[FoundDecode]]:
    """That of a later process, and what it finds."""
    journal = Journal(os.dup(descriptor), _SHAPE, _NUM_SLOTS)
    return journal, journal.read(_BLOCK_TOKENS, _NUM_BLOCKS)


def _open(journal: Journal, record: bytes = b"request", ids: Sequence[int] = (5, 6, 7)) -> Slot:
    slot = journal.open_slot(record, ids)
    assert slot is not None
    return slot


def test_the_next_process_finds_the_request_the_ids_and_the_blocks_with_kv(descriptor: int) -> None:
    slot = _open(_journal(descriptor))
    slot.grant([9, 8])
    slot.advance(3, [5, 6, 7, 70], cached_tokens=2)
    slot.note(attempt=3, attachment=4)
    journal, [found] = _read(descriptor)
    assert (found.record, found.ids, found.blocks, found.computed) == (b"request", [5, 6, 7, 70], [9], 3)
    assert found.cached_tokens == 2
    assert found.slot.last_reader == (3, 4)
    assert journal.damaged == 0


def test_blocks_that_were_taken_away_are_not_found(descriptor: int) -> None:
    slot = _open(_journal(descriptor))
    slot.grant([9, 8])
    slot.advance(3, [5, 6, 7, 70], 0)
    slot.revoke()
    _, [found] = _read(descriptor)
    assert (found.ids, found.blocks, found.computed) == ([5, 6, 7, 70], [], 0)


def test_a_slot_is_its_next_decodes_alone(descriptor: int) -> None:
    journal = _journal(descriptor)
    first = _open(journal, b"first", [1, 2, 3, 4, 5])
    for count in range(10):
        first.advance(4, [1, 2, 3, 4, 5, *range(count)], 0)
        first.note(7, 7 + count)
    journal.free_slot(first)
    again, nothing = _read(descriptor)
    assert nothing == []
    _open(again, b"second", [9])
    _, [found] = _read(descriptor)
    assert (found.record, found.ids, found.slot.last_reader) == (b"second", [9], (0, 0))


def test_slots_that_were_taken_over_are_not_given_to_others(descriptor: int) -> None:
    _open(_journal(descriptor))
    journal, [found] = _read(descriptor)
    others = [journal.open_slot(b"", [1]) for _ in range(_NUM_SLOTS)]
    assert [slot is None for slot in others] == [False] * (_NUM_SLOTS - 1) + [True]
    assert found.slot not in others
    journal.free_slot(found.slot)
    assert _open(journal) is found.slot


@pytest.mark.parametrize("ids", [0, _SHAPE.tokens + 1])
def test_what_does_not_fit_is_not_journaled(descriptor: int, ids: int) -> None:
    journal = _journal(descriptor)
    record = b"x" * (RECORD_BYTES + 1) if not ids else b""
    assert journal.open_slot(record, [1] * ids) is None
    assert journal.has_room


def test_a_decode_that_outgrows_its_slot_ends_with_its_process(descriptor: int) -> None:
    journal = _journal(descriptor)
    slot = _open(journal)
    slot.grant(list(range(1, _SHAPE.blocks + 2)))
    slot.advance(3, [5, 6, 7, 70], 0)
    assert _read(descriptor)[1] == []


def test_a_decode_that_two_processes_have_died_with_is_dropped_unless_it_got_on(descriptor: int) -> None:
    _open(_journal(descriptor))
    for _ in range(2):
        _, [found] = _read(descriptor)
        found.slot.take_over(found.blocks, found.computed)
    assert _read(descriptor)[1] == []
    slot = _open(_journal(descriptor))
    for number in range(5):
        slot.advance(0, [5, 6, 7, *range(number + 1)], 0)
        _, [found] = _read(descriptor)
        found.slot.take_over(found.blocks, found.computed)
        slot = found.slot


@pytest.mark.parametrize("cut", [0.0, 0.1, 0.5, 0.9])
def test_a_torn_head_leaves_the_one_before_it(descriptor: int, cut: float) -> None:
    slot = _open(_journal(descriptor))
    slot.grant([9, 8])
    slot.advance(3, [5, 6, 7, 70], 0)
    before = os.pread(descriptor, _SIZE, 0)
    slot.advance(4, [5, 6, 7, 70, 71], 0)
    after = os.pread(descriptor, _SIZE, 0)
    changed = [at for at in range(_SIZE) if before[at] != after[at]]
    for at in changed[int(len(changed) * cut) :]:
        os.pwrite(descriptor, before[at : at + 1], at)
    _, [found] = _read(descriptor)
    assert (found.ids, found.computed) in [([5, 6, 7, 70], 3), ([5, 6, 7, 70, 71], 4)]


def test_every_one_of_a_thousand_damages_is_found() -> None:
    chosen = random.Random(20)
    changed = 0
    for _ in range(1000):
        descriptor = os.memfd_create("journal")
        os.ftruncate(descriptor, _SIZE)
        decodes = _lives(_journal(descriptor), chosen)
        _damage(descriptor, decodes, chosen)
        journal, found = _read(descriptor)
        is_changed = _is_changed(found, decodes)
        assert not is_changed or journal.damaged
        changed += is_changed
        os.close(descriptor)
    assert changed > 300  # others were of the older head, or of the last reader


def _lives(journal: Journal, chosen: random.Random) -> list[Decode]:
    """Decodes that begin, grow, are preempted and end, as an engine would have them."""
    running: list[Decode] = []
    free = list(range(1, _NUM_BLOCKS))
    for _ in range(60):
        if len(running) < _NUM_SLOTS - 1 and chosen.random() < 0.3:
            ids = tuple(chosen.randrange(1000) for _ in range(chosen.randrange(1, 20)))
            state = State(chosen.randbytes(chosen.randrange(1, 300)), ids, (), 0)
            running.append(Decode(_open(journal, state.record, ids), state, [state]))
        if running:
            _live(chosen.choice(running), journal, running, free, chosen)
    return running


def _live(decode: Decode, journal: Journal, running: list[Decode], free: list[int], chosen: random.Random) -> None:
    state, what = decode.state, chosen.random()
    if what < 0.1:
        decode.slot.revoke()
        free.extend(state.blocks)
        decode.history.clear()
        decode.note(State(state.record, state.ids, (), 0))
        if chosen.random() < 0.5:
            journal.free_slot(decode.slot)
            running.remove(decode)
        return
    missing = -(-len(state.ids) // _BLOCK_TOKENS) - len(state.blocks)
    if missing > 0:
        chosen.shuffle(free)
        state = State(state.record, state.ids, (*state.blocks, *[free.pop() for _ in range(missing)]), state.computed)
        decode.slot.grant(list(state.blocks))
        decode.note(state)
    if len(state.ids) < 60:
        state = State(state.record, (*state.ids, chosen.randrange(1000)), state.blocks, len(state.ids))
        decode.slot.advance(state.computed, list(state.ids), 0)
        decode.note(state)


def _damage(descriptor: int, decodes: Sequence[Decode], chosen: random.Random) -> None:
    """Damages what counts: a bit, some bytes, or a part that becomes zero, of heads, request, ids or blocks."""
    decode = chosen.choice(decodes)
    state = decode.state
    parts = [
        (0, 116),
        (256, len(state.record)),
        (_SHAPE.ids_at, 4 * len(state.ids)),
        (_SHAPE.blocks_at, 4 * len(state.blocks)),
    ]
    start, size = chosen.choice([part for part in parts if part[1]])
    at = decode.slot.index * _SHAPE.num_bytes + start + chosen.randrange(size)
    match chosen.randrange(4):
        case 0:
            [byte] = os.pread(descriptor, 1, at)
            os.pwrite(descriptor, bytes([byte ^ 1 << chosen.randrange(8)]), at)
        case 1:
            os.pwrite(descriptor, chosen.randbytes(chosen.randrange(1, 64)), at)
        case 2:
            os.pwrite(descriptor, bytes(chosen.randrange(1, 4096)), at)
        case 3:
            other = chosen.randrange(_NUM_SLOTS) * _SHAPE.num_bytes
            os.pwrite(
                descriptor, os.pread(descriptor, _SHAPE.num_bytes, other), at // _SHAPE.num_bytes * _SHAPE.num_bytes
            )


def _is_changed(found: Sequence[FoundDecode], decodes: Sequence[Decode]) -> bool:
    """True if anything is not as it was last written. What is found must have been true all the same."""
    by_record = {decode.state.record: decode for decode in decodes}
    for one in found:
        decode = by_record[one.record]
        assert any(_is_of(one, state) for state in decode.history[-2:]), one
    last = [decode for decode in decodes if any(_is_of(one, decode.state, whole=True) for one in found)]
    return len(last) < len(decodes)


def _is_of(one: FoundDecode, state: State, *, whole: bool = False) -> bool:
    computed = min(state.computed, len(state.ids) - 1)
    needed = state.blocks[: -(-computed // _BLOCK_TOKENS)]
    has_kv = (tuple(one.blocks), one.computed) == (needed, computed)
    is_dropped = not whole and (one.blocks, one.computed) == ([], 0)
    return one.record == state.record and tuple(one.ids) == state.ids and (has_kv or is_dropped)
