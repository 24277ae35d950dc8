"""Counts the fields of a message before it is parsed: the cost of parsing depends on them, not on the size in bytes.

Two bytes may be a whole inner message. Parsed, each takes about 75 ns and 140 bytes, and more to iterate over: 8 MiB of
them take half a second without a pause, and half a gigabyte.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.errors import InvalidRequest

# Numbers of a packed list parse this many times faster than other fields.
_NUMBERS_A_FIELD = 16
_NUMBERS_A_TURN = 64 * 1024
_TEXT_A_TURN = 64 * 1024
_FIELDS_A_TURN = 1024
_CONTINUED = bytes(range(128, 256))
_LONGEST_CHARACTER = 4  # bytes, in UTF-8
_WITHIN_CHARACTERS = bytes(range(128, 192))  # in UTF-8, every byte of a character but its first

# The kinds of values on the wire; the others are groups, which proto3 does not have.
_VARINT, LENGTH_DELIMITED = 0, 2
_FIXED_SIZES = {1: 8, 5: 4}
KINDS = (_VARINT, LENGTH_DELIMITED, *_FIXED_SIZES)


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The most characters of a message's texts and bytes: of each, and of all together.

    The fields `media`, by their full names, count for neither: each has a limit of its own, in bytes.
    """

    each: int
    together: int
    media: frozenset[str] = frozenset()
    media_bytes: int = 0


@dataclass(slots=True)
class _Shape:
    """The fields of a message that contain several values, by field number: messages and packed lists."""

    messages: dict[int, "_Shape"]
    packed: frozenset[int]
    name: str
    full_name: str
    names: dict[int, str]


class Malformed(Exception):
    """The bytes are not a message."""


def count_fields(descriptor: Descriptor, wire: bytes | bytearray, most: int, texts: TextLimits | None = None) -> bool:
    """True if `wire` is well-formed, as far as counting can tell; otherwise it must not be parsed.

    Counts every field at every depth, and 16 numbers of a packed list as one. Lets other threads run meanwhile. Raises
    InvalidRequest naming the field at which the count exceeded `most`, or that is too long for `texts`.
    """
    try:
        _Count(wire, most, texts).message(_shape(descriptor))
    except (Malformed, IndexError):
        return False
    return True


class _Count:
    def __init__(self, wire: bytes | bytearray, most: int, texts: TextLimits | None) -> None:
        self._wire = wire
        self._most = most
        self._left = most
        self._texts = texts
        self._characters_left = texts.together if texts else 0

    def message(self, shape: _Shape) -> None:
        """One loop over all depths: a function call for each message would cost more than the rest."""
        wire, position, end = self._wire, 0, len(self._wire)
        outer: list[tuple[_Shape, int]] = []
        while True:
            while position >= end:
                if position > end:
                    raise Malformed
                if not outer:
                    return
                shape, end = outer.pop()
            tag = wire[position]
            position += 1
            if tag >= 128:
                tag, position = varint(wire, position - 1)
            self._take(1, shape, tag >> 3)
            kind = tag & 7
            if kind == LENGTH_DELIMITED:
                length = wire[position]
                position += 1
                if length >= 128:
                    length, position = varint(wire, position - 1)
                if position + length > end:
                    raise Malformed
                inner = shape.messages.get(tag >> 3)
                if inner is not None:
                    outer.append((shape, end))
                    shape, end = inner, position + length
                    continue
                if tag >> 3 in shape.packed:
                    self._numbers(shape, tag >> 3, position, position + length)
                elif self._texts is not None:
                    self._text(self._texts, shape, tag >> 3, position, length)
                position += length
            elif kind == _VARINT:
                position = varint(wire, position)[1]
            elif kind in _FIXED_SIZES:
                position += _FIXED_SIZES[kind]
            else:
                raise Malformed

    def _numbers(self, shape: _Shape, number: int, start: int, end: int) -> None:
        for position in range(start, end, _NUMBERS_A_TURN):
            part = self._wire[position : min(end, position + _NUMBERS_A_TURN)]
            self._take(len(part.translate(None, _CONTINUED)) // _NUMBERS_A_FIELD, shape, number)

    def _text(self, limits: TextLimits, shape: _Shape, number: int, start: int, length: int) -> None:
        if limits.media and f"{shape.full_name}.{shape.names.get(number)}" in limits.media:
            if length > limits.media_bytes:
                raise InvalidRequest.of(_path(shape, number), f"has {length} bytes of at most {limits.media_bytes}")
            return
        most = min(limits.each, self._characters_left)
        characters = length
        if most < length <= most * _LONGEST_CHARACTER:
            # What is no UTF-8 may have no first bytes.
            characters = max(self._characters(start, start + length, most), length // _LONGEST_CHARACTER)
        if characters > most:
            text = f"has {length} bytes; the texts of no request that a model here can answer are so long"
            raise InvalidRequest.of(_path(shape, number), text)
        self._characters_left -= characters

    def _characters(self, start: int, end: int, most: int) -> int:
        """The characters of a text in UTF-8; no more are counted than the first above `most`."""
        found = 0
        for position in range(start, end, _TEXT_A_TURN):
            found += len(self._wire[position : min(end, position + _TEXT_A_TURN)].translate(None, _WITHIN_CHARACTERS))
            if found > most:
                break
            time.sleep(0)
        return found

    def _take(self, fields: int, shape: _Shape, number: int) -> None:
        before, self._left = self._left, self._left - fields
        if self._left < 0:
            raise InvalidRequest.of(_path(shape, number), f"the request has more than {self._most} fields in all")
        if before // _FIELDS_A_TURN != self._left // _FIELDS_A_TURN:
            # Otherwise the event loop waits until the interpreter takes the lock from this thread.
            time.sleep(0)


def _path(shape: _Shape, number: int) -> str:
    return ".".join(name for name in (shape.name, shape.names.get(number, "")) if name) or "request"


def varint(wire: bytes | bytearray, position: int) -> tuple[int, int]:
    """The number at `position`, and its end. Raises Malformed, and IndexError where the bytes end before it."""
    number = 0
    for index in range(10):
        byte = wire[position + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, position + index + 1
    raise Malformed


def value_of(wire: bytes | bytearray, kind: int, position: int) -> tuple[int, int]:
    """The start and the end of the value of a field, which may be cut off, without its length. Raises Malformed."""
    if kind == _VARINT:
        return position, varint(wire, position)[1]
    if kind == LENGTH_DELIMITED:
        length, start = varint(wire, position)
        return start, start + length
    if kind in _FIXED_SIZES:
        return position, position + _FIXED_SIZES[kind]
    raise Malformed


@cache
def _shape(descriptor: Descriptor) -> _Shape:
    return _shape_below(descriptor, "", {})


def _shape_below(descriptor: Descriptor, name: str, outer: dict[Descriptor, _Shape]) -> _Shape:
    """Messages may be recursive; then the first path to one is its name."""
    if descriptor in outer:
        return outer[descriptor]
    fields = descriptor.fields
    names = {field.number: field.name for field in fields}
    shape = _Shape({}, frozenset(_packed(fields)), name, descriptor.full_name, names)
    for field in fields:
        if field.message_type is not None:
            path = f"{name}.{field.name}" if name else field.name
            shape.messages[field.number] = _shape_below(field.message_type, path, {**outer, descriptor: shape})
    return shape


def _packed(fields: Sequence[FieldDescriptor]) -> list[int]:
    """The numbers of the fields whose values may be packed into one run of bytes."""
    single = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)
    return [field.number for field in fields if field.is_repeated and field.type not in single]
