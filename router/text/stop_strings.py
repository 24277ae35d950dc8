"""Finds stop strings in growing text, and releases all text that cannot become part of one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stopped:
    """A match. `text` is the rest to send, which includes the stop string only if the request asks for it."""

    text: str
    stop_string: str


class StopStrings:
    """Searches growing text for the stop string that is complete first; of several, the longest.

    So the result does not depend on how the text was divided into tokens.
    """

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        self._include = include
        self._prefixes = frozenset(string[:end] for string in strings for end in range(1, len(string)))
        self._longest_prefix = max((len(prefix) for prefix in self._prefixes), default=0)
        self._held = ""

    def push(self, text: str, may_stop: bool) -> str | Stopped:
        """The text that can be sent now, or the match. Without `may_stop`, stop strings are ordinary text."""
        searched = len(self._held)
        waiting = self._held + text
        if may_stop and (stopped := self._search(waiting, searched)):
            self._held = ""
            return stopped
        start = self._possible_start(waiting)
        self._held = waiting[start:]
        return waiting[:start]

    def would_stop(self, text: str) -> bool:
        """True if a stop string would be complete in this text, wherever it is divided into tokens."""
        return self._search(self._held + text, len(self._held)) is not None

    def flush(self) -> str:
        """The text that was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str, searched: int) -> Stopped | None:
        """The match that ends first after `searched`; earlier ones were sent as text."""
        first: tuple[int, str] | None = None
        for string in self._strings:
            start = text.find(string, max(0, searched - len(string) + 1))
            if start >= 0 and (first is None or start + len(string) < first[0]):
                first = (start + len(string), string)
        if first is None:
            return None
        end, string = first
        return Stopped(text[: end if self._include else end - len(string)], string)

    def _possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest_prefix), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)
