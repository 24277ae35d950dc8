"""Finds the wrong field in bytes that cannot be parsed; the parser does not name it."""

import time
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from rpc.interceptors.counting import KINDS, LENGTH_DELIMITED, Malformed, value_of, varint

# Protobuf's parsers refuse deeper messages.
_MAX_DEPTH = 100

# Walking in Python is slow: after this many fields the place is not worth the time.
_MAX_FIELDS = 20_000
_FIELDS_A_TURN = 256

_NOT_A_MESSAGE = "is not a valid protobuf message"


@dataclass(frozen=True, slots=True)
class MalformedField:
    """A fault in a message: the path of a field, such as `chat.messages[0].role`, and a description."""

    field: str
    description: str


class _Broken(Exception):
    """Ends the walk: the bytes at `path` are invalid."""

    def __init__(self, path: str, description: str) -> None:
        super().__init__(path)
        self.fault = MalformedField(path or "request", description)


def find_fault(descriptor: Descriptor, wire: bytes | bytearray) -> MalformedField:
    """The first fault in bytes that could not be parsed as a message of `descriptor`.

    `request` stands for the message as a whole, where no field can be named.
    """
    walk = _Walk(wire)
    try:
        walk.message(descriptor, _Span(0, len(wire)), "", _MAX_DEPTH)
    except _Broken as broken:
        return broken.fault
    except (Malformed, IndexError):
        return MalformedField(walk.path or "request", "is cut off")
    return MalformedField("request", _NOT_A_MESSAGE)


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


class _Walk:
    """One pass over the bytes of a message, in the order in which they were sent. `path` is of what is read now."""

    def __init__(self, wire: bytes | bytearray) -> None:
        self._wire = wire
        self._fields_left = _MAX_FIELDS
        self.path = ""

    def message(self, descriptor: Descriptor, span: _Span, path: str, depth: int) -> None:
        if depth == 0:
            raise _Broken(path, "is nested too deeply")
        seen: dict[int, int] = {}
        position = span.start
        while position < span.end:
            self.path = path
            tag, position = varint(self._wire, position)
            if position > span.end:
                raise _Broken(path, "is cut off")
            field = descriptor.fields_by_number.get(tag >> 3)
            here = path if field is None else _join(path, field, seen)
            value = self._value(tag & 7, _Span(position, span.end), here)
            if field is not None and tag & 7 == LENGTH_DELIMITED:
                self._check(field, value, here, depth)
            position = value.end

    def _check(self, field: FieldDescriptor, value: _Span, path: str, depth: int) -> None:
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            self.message(field.message_type, value, path, depth - 1)
        elif field.type == FieldDescriptor.TYPE_STRING:
            try:
                self._wire[value.start : value.end].decode()
            except UnicodeDecodeError:
                raise _Broken(path, "is not valid UTF-8") from None

    def _value(self, kind: int, span: _Span, path: str) -> _Span:
        """The bytes of a field's value, without its length."""
        self._fields_left -= 1
        if self._fields_left == 0:
            raise _Broken("", _NOT_A_MESSAGE)
        if self._fields_left % _FIELDS_A_TURN == 0:
            # Large messages are searched in a thread: the event loop is let in.
            time.sleep(0)
        if kind not in KINDS:
            raise _Broken(path, f"has the unknown wire type {kind}")
        self.path = path
        start, end = value_of(self._wire, kind, span.start)
        if end > span.end:
            raise _Broken(path, "is cut off")
        return _Span(start, end)


def _join(path: str, field: FieldDescriptor, seen: dict[int, int]) -> str:
    name = f"{path}.{field.name}" if path else field.name
    if not field.is_repeated:
        return name
    index = seen.get(field.number, 0)
    seen[field.number] = index + 1
    return f"{name}[{index}]"
