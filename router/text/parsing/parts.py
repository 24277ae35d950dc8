"""The parts of an answer's text, and the Protocol of the parsers that find them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer proper. Without white space that only separates it from something else in `raw`."""

    text: str
    raw: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model wrote before its answer, without markers."""

    text: str
    raw: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a tool. `arguments` is a JSON object. Of several calls in one block the first has its `raw`."""

    name: str
    arguments: str
    raw: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of the arguments of a call that is not complete. Its `raw` comes with the whole."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call that has come in pieces, and is none."""

    raw: str


Part: TypeAlias = Text | Reasoning | ToolCall | CallPiece | BrokenCall


class Parser(Protocol):
    """Divides a growing text into parts. The `raw` of all parts together are the text, however it was cut."""

    def push(self, text: str) -> Sequence[Part]:
        """The parts that are certain with this text. The rest is held back."""

    def flush(self) -> Sequence[Part]:
        """The parts of what was held back, at the end of the text."""


def plain(text: str) -> list[Part]:
    """The text as it is; nothing if it is empty."""
    return [Text(text, text)] if text else []


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
