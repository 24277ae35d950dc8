"""Separates reasoning, between <think> and </think>, from the answer."""

from router.text.parsing.parts import Part, Reasoning, Text, overlap, plain

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
