"""Parsers for tool calls: between markers, and as a JSON object that is the whole answer.

The arguments of a call while the model writes it: the text of a JSON object, up to where it ends.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence

from router.text.parsing.parts import BrokenCall, CallPiece, Part, Text, ToolCall, overlap, plain

# A head is looked for in so many characters of each longer text.
_LONGEST_HEAD = 1024
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class GrowingArguments:
    """The arguments in a growing text, which begins with a head that names the call, one of `names`.

    The name is the last group that the head has found.
    """

    def __init__(self, head: re.Pattern[str], names: Collection[str]) -> None:
        self._head = head
        self._names = names
        self.name = ""
        self._begin = self._at = 0  # from where, and up to where the arguments have been returned
        self._depth = 0
        self._is_quoted = False
        self._has_ended = False

    def pieces(self, text: str) -> list[Part]:
        """The arguments that have come since the last call."""
        is_begun, more = bool(self.name), self.more(text)
        return [CallPiece(self.name, more)] if more or (more is not None and not is_begun) else []

    def more(self, text: str) -> str | None:
        """The part of the arguments that has come since the last call; None before the call's name is known."""
        if not self.name and not self._find_head(text):
            return None
        begin = self._at
        if not self._has_ended:
            self._at = self._scan(text)
        return text[begin : self._at]

    def _find_head(self, text: str) -> bool:
        found = self._head.match(text, 0, _LONGEST_HEAD)
        if found is None or found[found.lastindex or 0] not in self._names:
            return False
        self.name, self._begin = found[found.lastindex or 0], found.end()
        self._at = self._begin
        return True

    def are_of(self, text: str, name: str, arguments: str) -> bool:
        """True if nothing of the text has been returned, or all of this call: one that has two names or arguments can
        be read otherwise once it is complete.
        """
        try:
            returned = json.loads(text[self._begin : self._at]) if self.name else None
            return not self.name or (self.name, returned) == (name, json.loads(arguments))
        except (ValueError, RecursionError):
            return False

    def _scan(self, text: str) -> int:
        """The end of the arguments, or what has come of them."""
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


# The calls in a block's text, as (name, arguments); None if it does not parse.
Read = Callable[[str], "Sequence[tuple[str, str]] | None"]

# What begins and ends a string of JSON. None contains a new line, so that a missing quote spoils one line only.
_QUOTES = re.compile(r'\\.|["\n]')


class BlockParser:
    """Calls in blocks from `begin` to `end`. Without an `end` a block goes on to the next one, or to the end.

    A marker in a string of JSON is a part of the string. `read` gets a block without its markers. A block that it
    cannot read, and one that does not end, is text. With `growing`, which finds the arguments in a block with its
    marker, they come as they grow; such a block is no text any more.
    """

    def __init__(
        self, begin: str, end: str, read: Read, growing: "Callable[[], GrowingArguments] | None" = None
    ) -> None:
        self._begin = begin
        self._end = end
        self._read = read
        self._growing = growing
        self._arguments: GrowingArguments | None = None
        self._held = ""
        self._is_inside = False
        self._searched = 0
        self._quoted_to = 0
        self._is_quoted = False
        self._follows_call = False

    def push(self, text: str) -> list[Part]:
        """Text before a block at once, a block once it has ended."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            found = self._inside() if self._is_inside else self._outside()
            if found is None:
                break
            parts += found
        return parts + self._pieces(self._held) if self._is_inside else parts

    def flush(self) -> list[Part]:
        """The rest: a block without an `end` may be complete."""
        parts: list[Part] = []
        end = self._end or self._begin
        # A quote that was never closed hides no call after its block.
        while self._is_inside and (at := self._held.find(end, len(self._begin))) >= 0:
            if not self._end and self._read(self._held[len(self._begin) :]):
                break
            self._is_inside = False
            parts += [*self._block(self._pop(at + len(self._end))), *self.push("")]
        return parts + self._rest()

    def _rest(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._is_inside and not self._end:
            return self._block(held)
        return self._unread(held)

    def _outside(self) -> list[Part] | None:
        at = self._held.find(self._begin)
        if at >= 0:
            self._is_inside, self._is_quoted = True, False
            self._arguments = self._growing() if self._growing else None
            self._searched = self._quoted_to = len(self._begin)
            return self._text(self._pop(at))
        ready = len(self._held) - overlap(self._held, self._begin)
        return self._text(self._pop(ready)) if ready else None

    def _inside(self) -> list[Part] | None:
        end = self._end or self._begin
        at = self._held.find(end, max(len(self._begin), self._searched))
        while at >= 0 and self._in_string(at):
            at = self._held.find(end, at + 1)
        if at < 0:
            self._searched = len(self._held) - len(end) + 1
            return None
        pieces = self._pieces(self._held[:at])
        self._is_inside = False
        return [*pieces, *self._block(self._pop(at + len(self._end)))]

    def _pieces(self, block: str) -> list[Part]:
        """The arguments that have come of the block that has begun."""
        return self._arguments.pieces(block) if self._arguments else []

    def _unread(self, block: str) -> list[Part]:
        """A block that is no call: text, unless it has been sent as the beginning of one."""
        has_begun = self._arguments is not None and bool(self._arguments.name)
        self._arguments = None
        return [BrokenCall(block)] if has_begun else self._text(block)

    def _in_string(self, at: int) -> bool:
        """True if a string of JSON goes on at this place, which is not before the last one asked for."""
        for found in _QUOTES.finditer(self._held, self._quoted_to, at):
            if len(found[0]) == 1:
                self._is_quoted = found[0] == '"' and not self._is_quoted
        self._quoted_to = at
        return self._is_quoted

    def _block(self, block: str) -> list[Part]:
        body = block[len(self._begin) : len(block) - len(self._end)]
        calls = self._read(body)
        if not calls or (self._arguments and not self._arguments.are_of(block, *calls[0])):
            return self._unread(block)
        self._arguments = None
        self._follows_call = True
        return _calls(calls, block)

    def _text(self, text: str) -> list[Part]:
        if not text:
            return []
        # White space between calls belongs to neither.
        shown = text.lstrip() if self._follows_call else text
        self._follows_call = self._follows_call and not shown
        return [Text(shown, text)]

    def _pop(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class WholeAnswerParser:
    """Calls that are the whole answer, from its first character: one of `openings`, white space aside.

    Other answers go through to `otherwise`. With `growing` the arguments of the first call come as they grow.
    """

    def __init__(
        self, openings: Sequence[str], read: Read, otherwise: BlockParser, growing: GrowingArguments | None = None
    ) -> None:
        self._openings = openings
        self._read = read
        self._otherwise = otherwise
        self._growing = growing
        self._held = ""
        self._is_undecided = True

    def push(self, text: str) -> list[Part]:
        """Only arguments while the answer may be a call."""
        if not self._is_undecided:
            return self._otherwise.push(text)
        self._held += text
        opening = "".join(self._held[:256].split())
        if any(opening.startswith(one) or one.startswith(opening) for one in self._openings):
            return self._growing.pieces(self._held) if self._growing else []
        self._is_undecided = False
        held, self._held = self._held, ""
        return self._otherwise.push(held)

    def flush(self) -> list[Part]:
        """The calls, or what was held back as text."""
        held, self._held = self._held, ""
        if not self._is_undecided:
            return self._otherwise.flush()
        calls = self._read(held)
        if calls and (self._growing is None or self._growing.are_of(held, *calls[0])):
            return _calls(calls, held)
        return [BrokenCall(held)] if self._growing and self._growing.name else plain(held)


def _calls(calls: Sequence[tuple[str, str]], raw: str) -> list[Part]:
    return [ToolCall(name, arguments, raw if index == 0 else "") for index, (name, arguments) in enumerate(calls)]
