"""Messages of a newer version: every enum that is set has a number without a name here."""

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

NEWER = 77
Path = tuple[FieldDescriptor, ...]


def methods(files: Iterable[Any]) -> Iterator[MethodDescriptor]:
    for file in files:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def enum_paths(message: Descriptor, seen: tuple[Descriptor, ...] = ()) -> Iterator[Path]:
    """The ways to every enum in a message, at any depth."""
    for field in message.fields:
        if field.enum_type is not None:
            yield (field,)
        elif field.message_type is not None and field.message_type not in seen:
            for rest in enum_paths(field.message_type, (*seen, message)):
                yield (field, *rest)


def set_path(message: Any, path: Path) -> None:
    """Sets the enum at the end of a path, in messages that are made on the way."""
    field, *rest = path
    if not rest:
        if field.is_repeated:
            getattr(message, field.name).append(NEWER)
        else:
            setattr(message, field.name, NEWER)
    elif field.is_repeated:
        found = getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            set_path(found["x"], tuple(rest[1:]))
        else:
            set_path(found[0] if found else found.add(), tuple(rest))
    else:
        set_path(getattr(message, field.name), tuple(rest))


def make_newer(message: Message, seen: set[str]) -> None:
    """Gives each enum that is set in a message a number without a name."""
    for field, value in message.ListFields():
        if field.enum_type is not None:
            seen.add(field.full_name)
            if field.is_repeated:
                value[:] = [NEWER] * len(value)
            else:
                setattr(message, field.name, NEWER)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for one in value if field.is_repeated else [value]:
                make_newer(one, seen)
