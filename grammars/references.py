"""References of JSON Schemas, which may point to any place of their document."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


class BrokenReference(ValueError):
    """A `$ref` that names nothing in its document, with the reason."""


def find_referred(root: object, reference: object) -> tuple[str, object] | None:
    """Returns the path from the root, and the value there; None for an anchor, which is where schemas usually are.

    Raises BrokenReference.
    """
    if not isinstance(reference, str):
        raise BrokenReference("must be a text")
    document, _, fragment = reference.partition("#")
    identity = root.get("$id") if isinstance(root, Mapping) else None
    if document and document != (identity.partition("#")[0] if isinstance(identity, str) else None):
        raise BrokenReference("points outside of the schema; other documents are not read")
    if fragment and not fragment.startswith("/"):
        return None
    path, value = "", root
    for part in fragment.split("/")[1:]:
        step, value = _child(value, unquote(part).replace("~1", "/").replace("~0", "~"))
        path += step
    return path, value


def _child(value: Any, name: str) -> tuple[str, object]:
    if isinstance(value, Mapping) and name in value:
        return f".{name}", value[name]
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return f"[{int(name)}]", value[int(name)]
    raise BrokenReference(f"{name[:80]!r} does not exist there")
