"""The grammars of guided requests: as the API has them, and as texts that are joined, which the reference follows."""

import json
import re
from functools import lru_cache

from baton.inference.v1 import generate_pb2 as pb

END_ID = 256  # the end of the sequence, after the bytes
_SPACE = ("", " ", *("\n" + " " * count for count in range(33)))  # what the product allows between tokens of JSON
_NAMES = ("ann", "bob", "annabel", "a long name, of more tokens than a block has")
_CHOICES = ("no", "no, never", "perhaps", "nobody knows what comes of a question like this one, and nobody has asked")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": list(_NAMES)},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "done": {"type": "boolean"},
    },
    "required": ["name", "count", "done"],
    "additionalProperties": False,
}
_REGEX = "(ab|cd|e){20,60};"
_PARTS = ("ab", "cd", "e")

GUIDED = {
    "choice": pb.GuidedDecoding(choice=pb.Choices(texts=_CHOICES)),
    "regex": pb.GuidedDecoding(regex=_REGEX),
    "json": pb.GuidedDecoding(json_schema=json.dumps(_SCHEMA)),
}


def _json_texts() -> tuple[tuple[str, ...], ...]:
    values = (tuple(map(json.dumps, _NAMES)), tuple(map(str, range(100))), ("true", "false"))
    texts: list[tuple[str, ...]] = [("{",)]
    for number, (name, alternatives) in enumerate(zip(("name", "count", "done"), values, strict=True)):
        separator = [(",",), _SPACE] if number else []
        texts += [_SPACE, *separator, (f'"{name}"',), _SPACE, (":",), _SPACE, alternatives]
    return (*texts, _SPACE, ("}",))


# Each is one alternative of each part, one after the other.
_TEXTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "choice": (_CHOICES,),
    "regex": (*[_PARTS] * 20, *[("", *_PARTS)] * 40, (";",)),
    "json": _json_texts(),
}


def follows(kind: str, text: str) -> bool:
    """True if a whole answer is one of its grammar, by other means than following it."""
    if kind == "choice":
        return text in _CHOICES
    if kind == "regex":
        return re.fullmatch(_REGEX, text) is not None
    try:
        found = json.loads(text)
    except ValueError:
        return False
    name, count, done = (found.get(key) for key in _SCHEMA["properties"])  # type: ignore[attr-defined]
    return len(found) == 3 and name in _NAMES and count in range(100) and isinstance(done, bool)


def begins(kind: str, ids: list[int]) -> bool:
    """True if these are the first ids of an answer of its grammar."""
    follower, newest = Follower(kind), list[int]()
    for each in ids:
        if each not in follower.after(newest):
            return False
        newest = [each]
    return True


class Follower:
    """The place of an answer in its grammar: the rests of alternatives that may come, with the number of their part."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._rests = _rests(kind, 0)

    def after(self, ids: list[int]) -> list[int]:
        """The ids that may come after these new ones."""
        for byte in ids:
            known, self._rests = self._rests, frozenset()
            for part, rest in known:
                if rest[:1] == chr(byte):
                    self._rests |= {(part, rest[1:])} if rest[1:] else _rests(self._kind, part + 1)
        return sorted({ord(rest[0]) if rest else END_ID for _, rest in self._rests})


@lru_cache
def _rests(kind: str, part: int) -> frozenset[tuple[int, str]]:
    """The alternatives from a part on; an empty one is the end."""
    parts = _TEXTS[kind]
    if part == len(parts):
        return frozenset({(part, "")})
    skipped = _rests(kind, part + 1) if "" in parts[part] else frozenset()
    return skipped | {(part, text) for text in parts[part] if text}
