"""The parts of an answer's text, and the Protocol of the parsers that find them.

Separates reasoning, between <think> and </think>, from the answer.
"""

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


BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Reasoning at the beginning of an answer. `is_open` says that the prompt ends with <think>."""

    def __init__(self, is_open: bool) -> None:
        self._held = ""
        self._step = self._inside if is_open else self._start
        self._is_first = True

    def push(self, text: str) -> list[Part]:
        """Reasoning and text as they come."""
        self._held += text
        return self._step()

    def flush(self) -> list[Part]:
        """The text that may have been the beginning of a marker."""
        held, self._held = self._held, ""
        if self._step == self._inside:
            return [Reasoning(held.strip() if self._is_first else held, held)] if held else []
        return plain(held)

    def _start(self) -> list[Part]:
        opening = self._held.lstrip()
        if opening.startswith(BEGIN):
            length = self._held.index(BEGIN) + len(BEGIN)
            marker, self._held = self._held[:length], self._held[length:]
            self._step = self._inside
            return [Reasoning("", marker), *self._inside()]
        if BEGIN.startswith(opening):
            return []
        self._step = self._after
        return self._after()

    def _inside(self) -> list[Part]:
        at = self._held.find(END)
        if at < 0:
            return self._reason(len(self._held) - overlap(self._held, END))
        parts = self._reason(at)
        marker, self._held = self._held[: len(END)], self._held[len(END) :]
        self._step = self._separate
        return [*parts, Reasoning("", marker), *self._separate()]

    def _reason(self, length: int) -> list[Part]:
        raw = self._held[:length]
        shown = raw.lstrip() if self._is_first else raw
        self._is_first = self._is_first and not shown
        self._held = self._held[length:]
        return [Reasoning(shown, raw)] if raw else []

    def _separate(self) -> list[Part]:
        """White space between the reasoning and the answer belongs to neither."""
        raw, self._held = self._held, ""
        shown = raw.lstrip()
        if shown:
            self._step = self._after
        return [Text(shown, raw)] if raw else []

    def _after(self) -> list[Part]:
        raw, self._held = self._held, ""
        return plain(raw)
