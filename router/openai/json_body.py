"""Parses a JSON body. The number of its values is bounded first: parsing holds the interpreter, whatever the thread."""

import json
from typing import Any, NoReturn

from baton.errors import InvalidRequest

MAX_VALUES = 65_536
_STRUCTURE = (b",", b"[", b"{", b":")
_SURROGATE = (b"\\ud", b"\\uD")


def parse(body: bytes) -> dict[str, Any]:
    """The object in a body. Raises InvalidRequest, of the field `body`."""
    _bound_values(body)
    try:
        value = json.loads(body, parse_constant=_refuse)
        if any(escape in body for escape in _SURROGATE):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise InvalidRequest.of("body", "is not valid UTF-8, or has half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of("body", f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest.of("body", "must be a JSON object")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _bound_values(body: bytes) -> None:
    """Raises InvalidRequest for more than MAX_VALUES values; what is within strings does not count."""
    if sum(body.count(one) for one in _STRUCTURE) <= MAX_VALUES:
        return
    values, position = 0, 0
    while position < len(body):
        begin = body.find(b'"', position)
        begin = len(body) if begin < 0 else begin
        values += sum(body.count(one, position, begin) for one in _STRUCTURE)
        if values > MAX_VALUES:
            raise InvalidRequest.of("body", f"has more than {MAX_VALUES} values")
        position = _end_of_string(body, begin + 1)


def _end_of_string(body: bytes, position: int) -> int:
    """The position after the string that begins before `position`."""
    while True:
        end = body.find(b'"', position)
        if end < 0:
            return len(body)
        start = end
        while start > 0 and body[start - 1] == 0x5C:
            start -= 1
        position = end + 1
        if (end - start) % 2 == 0:
            return position
