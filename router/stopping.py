"""Finds stop strings in text that comes in pieces, and lets go of all text that cannot become part of one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string is complete. `text` is what to send still, the stop string itself included only if asked for."""

    text: str
    stop_string: str


class StopStrings:
    """Searches a growing text for the stop string that is complete first; of several, for the longest.

    That makes the result independent of how the text was cut into tokens.
    """

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        self._include = include
        self._prefixes = frozenset(string[:end] for string in strings for end in range(1, len(string)))
        self._longest_prefix = max((len(prefix) for prefix in self._prefixes), default=0)
        self._held = ""

    def push(self, text: str, may_stop: bool) -> str | Stopped:
        """The text that may be sent now, or the match. Unless `may_stop`, a complete stop string is only text."""
        if not self._strings:
            return text
        searched = len(self._held)
        waiting = self._held + text
        if may_stop and (stopped := self._search(waiting, searched)):
            self._held = ""
            return stopped
        start = self._possible_start(waiting)
        self._held = waiting[start:]
        return waiting[:start]

    def flush(self) -> str:
        """The text still held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str, searched: int) -> Stopped | None:
        """The match that ends first, of those that end after `searched`: others were let pass earlier."""
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
