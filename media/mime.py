"""MIME types as clients write them."""

from collections.abc import Sequence

from baton.errors import InvalidRequest, Unsupported
from media.item import MediaItem

_ALIASES = {"image/jpg": "image/jpeg"}


def normal(mime_type: str) -> str:
    """The type in lower case, without parameters, by its registered name."""
    bare = mime_type.partition(";")[0].strip().lower()
    return _ALIASES.get(bare, bare)


def check_declared(item: MediaItem, allowed: Sequence[str]) -> None:
    """Raises Unsupported if the item declares a type that is not accepted."""
    if item.mime_type and normal(item.mime_type) not in allowed:
        raise Unsupported(f"{item.mime_type_field}: {item.mime_type[:80]!r} is not accepted; {accepted(allowed)}")


def agreed(item: MediaItem, uri_type: str) -> str:
    """The type that an item and its URI declare. Raises InvalidRequest if they differ."""
    if item.mime_type and uri_type and normal(item.mime_type) != normal(uri_type):
        raise InvalidRequest.of(item.mime_type_field, "differs from the type that the data: URI gives")
    return item.mime_type or uri_type


def accepted(allowed: Sequence[str]) -> str:
    """The accepted types, for the end of a message."""
    return f"accepted are {', '.join(allowed)}"
