"""Random messages: any value in any field, and damaged bytes."""

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_DEPTH = 4
_MOST_ITEMS = 3

# Where limits are, and just beyond them.
_INTEGERS = st.sampled_from([0, 1, 2, 15, 16, 17, 255, 256, 257, 1000, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
_FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 1e30, float("nan"), float("inf"), -float("inf")])
_TEXTS = st.text(max_size=20) | st.sampled_from(["", "a", "\0", "../..", "{{ x }}", "{% raw %}", "𝕊" * 5, "r"])
_BYTES = st.binary(max_size=40)

Known = dict[str, st.SearchStrategy[Any]]


def messages(kind: type[Message], known: Known) -> st.SearchStrategy[Message]:
    """Messages of a kind with some of their fields set. Fields of a `known` name often have one of its values."""
    return st.composite(lambda draw: _message(draw, kind.DESCRIPTOR, known, _DEPTH))()


def mangled(source: st.SearchStrategy[Message]) -> st.SearchStrategy[bytes]:
    """The bytes of a message, some of them changed, lost or repeated; or no message at all."""
    return st.composite(lambda draw: _mangle(draw, draw(source).SerializeToString()))() | st.binary(max_size=60)


def _message(draw: Callable[..., Any], descriptor: Descriptor, known: Known, depth: int) -> Message:
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.booleans()):
            _fill(draw, message, field, known, depth)
    return message


def _fill(draw: Callable[..., Any], message: Message, field: FieldDescriptor, known: Known, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        if value.message_type is None:
            getattr(message, field.name)[_scalar(draw, key, known)] = _scalar(draw, value, known)
    elif field.message_type is not None:
        if depth == 0:
            return
        for _ in range(draw(st.integers(1, _MOST_ITEMS)) if field.is_repeated else 1):
            inner = _message(draw, field.message_type, known, depth - 1)
            if field.is_repeated:
                getattr(message, field.name).append(inner)
            else:
                getattr(message, field.name).CopyFrom(inner)
    elif field.is_repeated:
        count = draw(st.integers(0, _MOST_ITEMS))
        getattr(message, field.name).extend(_scalar(draw, field, known) for _ in range(count))
    else:
        setattr(message, field.name, _scalar(draw, field, known))


def _scalar(draw: Callable[..., Any], field: FieldDescriptor, known: Known) -> Any:
    if field.name in known and draw(st.integers(0, 3)):
        return draw(known[field.name])
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return draw(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw(st.booleans())
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return draw(_FLOATS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return draw(st.integers(0, 12))
        case FieldDescriptor.CPPTYPE_INT32:
            return draw(st.integers(-(2**31), 2**31 - 1) | st.sampled_from([0, -1, 1]))
        case FieldDescriptor.CPPTYPE_INT64:
            return draw(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, -1, 1]))
        case FieldDescriptor.CPPTYPE_UINT32:
            return draw(_INTEGERS.filter(lambda value: value < 2**32))
        case _:
            return draw(_INTEGERS)


def _mangle(draw: Callable[..., Any], wire: bytes) -> bytes:
    changed = bytearray(wire)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(changed)))
        match draw(st.integers(0, 3)):
            case 0:
                changed[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = changed[:at]
            case _:
                changed[at:at] = draw(st.binary(min_size=1, max_size=4))
    return bytes(changed)
