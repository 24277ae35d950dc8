"""JSON that clients send: numbers that no JSON holds are refused, each by its path."""

import json
from collections.abc import Callable, Iterator
from math import isinf
from typing import Any, NoReturn

from runtime.threads import let_others_run

_LONGEST_NAME = 80  # in a path
_LARGE = 64 * 1024  # of a text, in which numbers may take milliseconds
TOO_LARGE = "is a number beyond those of 64-bit floating point"


class NotFinite(ValueError):
    """A number such as 1e999, which would be read as an infinity. `path` is where it is in the value."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path or 'it'} {TOO_LARGE}")
        self.path = path


def refuse_constant(constant: str) -> NoReturn:
    """Raises ValueError, for NaN and the infinities."""
    raise ValueError(f"{constant} is not JSON")


def load_json(
    text: str | bytes,
    constant: Callable[[str], Any] = refuse_constant,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value of a text. Lets other threads run. Raises NotFinite, ValueError and RecursionError.

    A ValueError is a UnicodeError for what is not UTF-8, or has half of a surrogate pair.

    `constant` and `pairs` read what json.loads calls so.
    """
    has_infinite = False
    if isinstance(text, bytes):
        # json.loads would guess the encoding, and read half of a surrogate pair as a character.
        text = text.decode("utf-8-sig")

    def number(digits: str) -> float:
        nonlocal has_infinite
        value = float(let_others_run(digits))
        has_infinite = has_infinite or isinf(value)
        return value

    value = json.loads(
        text,
        parse_float=number,
        parse_int=_whole_number if len(text) > _LARGE else None,
        parse_constant=constant,
        object_hook=let_others_run,
        object_pairs_hook=pairs,
    )
    if "\\ud" in text or "\\uD" in text:
        require_pairs(value)
    if has_infinite:
        raise NotFinite(next((path for path, _ in located(value, _is_infinite)), ""))
    return value


def require_pairs(value: Any) -> None:
    """Raises UnicodeError for a text with half of a surrogate pair, wherever it is: nothing can encode it."""
    match value:
        case str():
            value.encode()
        case dict():
            for name, inner in value.items():
                name.encode()
                require_pairs(inner)
        case list():
            for inner in value:
                require_pairs(inner)


def located(value: Any, is_wanted: Callable[[Any], bool], path: str = "") -> Iterator[tuple[str, Any]]:
    """The wanted values within one, each with its path. As deep as json.loads can read."""
    match value:
        case dict():
            for name, inner in value.items():
                short = name[:_LONGEST_NAME]
                yield from located(inner, is_wanted, f"{path}.{short}" if path else short)
        case list():
            for index, inner in enumerate(value):
                yield from located(inner, is_wanted, f"{path}[{index}]")
        case _ if is_wanted(value):
            yield path, value


def _whole_number(digits: str) -> int:
    return int(let_others_run(digits))


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and isinf(value)
