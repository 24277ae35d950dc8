"""The arguments of a call while the model writes it: the text of a JSON object, up to where it ends."""

import re
from collections.abc import Collection

_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class GrowingArguments:
    """The arguments in a growing text, which begins with a head that names the call, one of `names`."""

    def __init__(self, head: re.Pattern[str], names: Collection[str]) -> None:
        self._head = head
        self._names = names
        self.name = ""
        self._at = 0  # up to where the arguments have been returned
        self._depth = 0
        self._is_quoted = False
        self._has_ended = False

    def more(self, text: str) -> str | None:
        """The part of the arguments that has come since the last call; None before the call's name is known."""
        if not self.name and not self._find_head(text):
            return None
        begin = self._at
        if not self._has_ended:
            self._at = self._scan(text)
        return text[begin : self._at]

    def _find_head(self, text: str) -> bool:
        found = self._head.match(text)
        if found is None or found[1] not in self._names:
            return False
        self.name, self._at = found[1], found.end()
        return True

    def _scan(self, text: str) -> int:
        """Where the arguments end, or what has come of them."""
        last = self._at
        for found in _STRUCTURE.finditer(text, self._at):
            last = found.end()
            if found[0] == '"':
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted and found[0][0] != "\\":
                self._depth += 1 if found[0] in "{[" else -1
                if not self._depth:
                    self._has_ended = True
                    return last
        # What follows a backslash at the end decides what it means.
        return len(text) - (text.endswith("\\") and last < len(text))
