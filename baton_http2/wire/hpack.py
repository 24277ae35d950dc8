"""HPACK (RFC 7541): a decoder that remembers whole header blocks, and fields encoded without any state.

The tables and Huffman's code are those of the package `hpack`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

from baton_http2.wire.frames import COMPRESSION_ERROR, ConnectionFailure

Field = tuple[bytes, bytes]

# A block that begins with it says that our table is empty, and stays so: no later change of the peer's limit has to
# be answered, because every size that it may choose is at least this one.
EMPTY_TABLE: Final = b"\x20"

_STATIC: Final[tuple[Field, ...]] = tuple((bytes(name), bytes(value)) for name, value in HeaderTable.STATIC_TABLE)
_TABLE_BYTES: Final = 4096
_ENTRY_OVERHEAD: Final = 32
_MAX_INTEGER_SHIFT: Final = 28

# How many header blocks of one connection are remembered, and how long each may be.
_REMEMBERED: Final = 64
_REMEMBERED_BYTES: Final = 512
# Longer strings are decoded each time.
_CACHED_STRING_BYTES: Final = 128
# A list that is so many times over its limit is not read to the end: the connection is closed.
HOPELESS: Final = 4


class HeaderListTooLarge(Exception):
    """The header list is over the limit. The tables are in step: the call can be refused, and the connection lives."""


class HpackDecoder:
    """One connection's header blocks, in the order in which they come.

    A block that only refers to the tables (what clients send from their second call on) means the same until the
    dynamic table changes, and is decoded once.
    """

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self._table: list[Field] = []  # The newest is last.
        self._table_bytes = 0
        self._table_limit = _TABLE_BYTES
        self._remembered: dict[bytes, Sequence[Field]] = {}

    def decode(self, block: bytes) -> Sequence[Field]:
        """The fields of a block. Raises ConnectionFailure if it is wrong, and HeaderListTooLarge."""
        remembered = self._remembered.get(block)
        if remembered is not None:
            return remembered
        try:
            return self._decode(block)
        except IndexError:
            raise _wrong("a header block ends early") from None

    def _decode(self, block: bytes) -> Sequence[Field]:
        fields: list[Field] = []
        at, end, list_bytes = 0, len(block), 0
        is_changed, may_resize = False, True
        while at < end:
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 0x7F)
                field = self._entry(index)
            elif first & 0xE0 == 0x20:
                if not may_resize:
                    raise _wrong("a table size update comes after a field")
                at = self._resize(block, at)
                is_changed = True
                continue
            else:
                field, at = self._literal(block, at)
                if first & 0x40:
                    self._add(field)
                    is_changed = True
            may_resize = False
            list_bytes += len(field[0]) + len(field[1]) + _ENTRY_OVERHEAD
            if list_bytes <= self._max_list_bytes:
                fields.append(field)
            elif list_bytes > HOPELESS * self._max_list_bytes:
                # A few bytes that stand for many. It is not worth the time to keep the tables in step.
                raise _wrong("a header list is far too large", "header_lists")
        if is_changed:
            self._remembered.clear()
        if list_bytes > self._max_list_bytes:
            raise HeaderListTooLarge
        if not is_changed and end <= _REMEMBERED_BYTES and len(self._remembered) < _REMEMBERED:
            self._remembered[block] = fields
        return fields

    def _literal(self, block: bytes, at: int) -> tuple[Field, int]:
        index, at = _integer(block, at, 0x3F if block[at] & 0x40 else 0x0F)
        if index:
            name = self._entry(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _resize(self, block: bytes, at: int) -> int:
        size, at = _integer(block, at, 0x1F)
        if size > _TABLE_BYTES:
            raise _wrong("a table size update is over the limit")
        self._table_limit = size
        self._evict()
        return at

    def _entry(self, index: int) -> Field:
        if index == 0 or index > len(_STATIC) + len(self._table):
            raise _wrong("an index is in no table")
        return _STATIC[index - 1] if index <= len(_STATIC) else self._table[len(_STATIC) - index]

    def _add(self, field: Field) -> None:
        self._table.append(field)
        self._table_bytes += len(field[0]) + len(field[1]) + _ENTRY_OVERHEAD
        self._evict()

    def _evict(self) -> None:
        while self._table_bytes > self._table_limit:
            name, value = self._table.pop(0)
            self._table_bytes -= len(name) + len(value) + _ENTRY_OVERHEAD


def literal(name: bytes, value: bytes) -> bytes:
    """A field that touches no table: a literal without indexing, with its name spelled out."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _wrong(reason: str, budget: str = "") -> ConnectionFailure:
    # Both sides' tables differ from here on.
    return ConnectionFailure(COMPRESSION_ERROR, reason, budget)


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
        if shift > _MAX_INTEGER_SHIFT:
            raise _wrong("an integer is too long")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    is_huffman = block[at] & 0x80
    length, at = _integer(block, at, 0x7F)
    text = block[at : at + length]
    if len(text) < length:
        raise _wrong("a string ends early")
    if is_huffman:
        text = _huffman(text) if length <= _CACHED_STRING_BYTES else _decode_huffman(text)
    return text, at + length


def _decode_huffman(text: bytes) -> bytes:
    rows = _HUFFMAN_ROWS
    state, flags = 0, HUFFMAN_COMPLETE
    out: list[bytes] = []
    for byte in text:
        symbols, state, flags = (rows[state] or _huffman_row(state))[byte]
        if flags & HUFFMAN_FAIL:
            raise _wrong("a string is not in Huffman's code")
        out.append(symbols)
    if not flags & HUFFMAN_COMPLETE:
        raise _wrong("a string is not in Huffman's code")
    return b"".join(out)


# What each byte gives in each state, made when it is first needed: symbols, next state, flags. The package's table goes
# by half a byte, which takes twice as long, and clients choose how much there is to decode.
_HuffmanRow = tuple[tuple[bytes, int, int], ...]
_HUFFMAN_ROWS: Final[list[_HuffmanRow | None]] = [None] * (len(HUFFMAN_TABLE) // 16)


def _huffman_row(state: int) -> _HuffmanRow:
    row = _HUFFMAN_ROWS[state] = tuple(_huffman_step(state, byte) for byte in range(256))
    return row


def _huffman_step(state: int, byte: int) -> tuple[bytes, int, int]:
    symbols = bytearray()
    flags = 0
    for nibble in (byte >> 4, byte & 0xF):
        state, flags, symbol = HUFFMAN_TABLE[state * 16 + nibble]
        if flags & HUFFMAN_FAIL:
            return b"", 0, HUFFMAN_FAIL
        if flags & HUFFMAN_EMIT_SYMBOL:
            symbols.append(symbol)
    return bytes(symbols), state, flags


_huffman = lru_cache(maxsize=512)(_decode_huffman)


def _length(value: int) -> bytes:
    if value < 0x7F:
        return bytes((value,))
    out = bytearray((0x7F,))
    value -= 0x7F
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
