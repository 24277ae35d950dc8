"""The syntax of URIs, read narrowly: what other programs read in two ways is refused."""

import re
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from rpc.errors import InvalidRequest

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
_AMBIGUOUS = re.compile(r"[^\x21-\x7e]|\\")
_MAX_LENGTH = 8192


def scheme(uri: str, field: str, enabled: Sequence[str]) -> str:
    """The scheme in lower case. Raises InvalidRequest, naming the enabled ones, if there is none."""
    match = _SCHEME.match(uri)
    if match is None:
        raise InvalidRequest.of(field, f"is not a URI; enabled are {listed(enabled)}")
    return match[1].lower()


def split(uri: str, field: str) -> SplitResult:
    """The parts of a URI that points somewhere, as opposed to a `data:` URI. Raises InvalidRequest."""
    if len(uri) > _MAX_LENGTH:
        raise InvalidRequest.of(field, f"is longer than {_MAX_LENGTH} characters")
    if _AMBIGUOUS.search(uri):
        raise InvalidRequest.of(field, "has a space, a backslash, a control or a non-ASCII character: escape them")
    try:
        return urlsplit(uri)
    except ValueError:
        raise InvalidRequest.of(field, "is not a valid URI") from None


def listed(schemes: Sequence[str]) -> str:
    """Schemes as messages show them."""
    return ", ".join(f"{name}:" for name in schemes)
