"""Positions in the ids of events: read as they were written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.resumable.event_ids import Position

_NUMBERS = st.integers(0, 2**32 - 1)
# Checksums with few digits, too.
_CHECKSUMS = st.integers(0, 32).flatmap(lambda bits: st.integers(0, 2**bits - 1))


_STATES = st.sampled_from(["", "o", "f", "u"])
_SHORT = st.builds(Position, _NUMBERS, _NUMBERS, _CHECKSUMS, state=_STATES)
_LONG = st.builds(Position, _NUMBERS, _NUMBERS, _CHECKSUMS, _NUMBERS, _CHECKSUMS, _NUMBERS, _NUMBERS, _STATES)


@given(_SHORT | _LONG)
def test_a_position_is_read_as_it_was_written(position: Position) -> None:
    if not (position.reasoning_bytes or position.tool_calls or position.offset):
        position.reasoning_crc = 0
    assert Position.parse(position.text) == position


@pytest.mark.parametrize("state", ["o", "f", "u"])
def test_the_letter_after_a_short_checksum_is_no_digit_of_it(state: str) -> None:
    position = Position(tokens=60, text_bytes=60, text_crc=0xB280B92, state=state)
    assert Position.parse(position.text) == position
