"""JSON that clients send: numbers that no JSON holds, and names given twice, are refused, each by its path."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isinf
from typing import Any, NoReturn

from runtime.threads import let_others_run

_LONGEST_NAME = 80  # in a path
_LARGE = 64 * 1024  # of a text, in which numbers may take milliseconds
_TOO_LARGE = "is a number beyond those of 64-bit floating point"
_REPEATED = "is given more than once"


class WrongValue(ValueError):
    """A value that would be read as another one. `path` is where it is."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'it'} {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Stands for an object that has this name more than once."""

    name: str


def refuse_constant(constant: str) -> NoReturn:
    """Raises ValueError, for NaN and the infinities."""
    raise ValueError(f"{constant} is not JSON")


def load_json(
    text: str | bytes,
    constant: Callable[[str], Any] = refuse_constant,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value of a text. Lets other threads run. Raises WrongValue for a number such as 1e999, ValueError and
    RecursionError.

    Any other ValueError is a UnicodeError for what is not UTF-8, or has half of a surrogate pair.

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
        raise WrongValue(next((path for path, _ in located(value, _is_infinite)), ""), _TOO_LARGE)
    return value


def load_unique_json(text: str | bytes, constant: Callable[[str], Any] = refuse_constant) -> Any:
    """Reads as load_json does. Raises WrongValue for a name that an object has more than once, too."""
    has_repeated = False

    def unique(pairs: list[tuple[str, Any]]) -> Any:
        nonlocal has_repeated
        found = dict(pairs)
        if len(found) == len(pairs):
            return let_others_run(found)
        has_repeated = True
        counts = Counter(name for name, _ in pairs)
        return _Repeated(next(name for name, count in counts.items() if count > 1))

    value = load_json(text, constant, unique)
    if has_repeated:
        path, one = next(located(value, lambda inner: isinstance(inner, _Repeated)))
        raise WrongValue(f"{path}.{one.name[:_LONGEST_NAME]}" if path else one.name[:_LONGEST_NAME], _REPEATED)
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
