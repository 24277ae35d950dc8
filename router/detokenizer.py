"""Turns ids into text as they come: a character split over tokens is held back until it is whole."""

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so three tokens without a whole character may still become one; four cannot.
_LONGEST_INCOMPLETE = 3
_WINDOW = 8
# Garbage that never becomes a character is let go after this many tokens, so that a step's cost stays bounded.
_LONGEST_WINDOW = 64


class Detokenizer:
    """The text of a growing sequence of ids, in pieces whose concatenation is the decoding of the whole.

    Decodes a short window that starts at a whole character: a token's text may depend on the one before it, as where
    a decoder strips the first space. Ids in `skipped` have no text. Not to be used after `flush`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: Collection[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._whole = 0  # ids of the window up to its last whole character
        self._sent = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a character is incomplete."""
        self._window += [token_id for token_id in ids if token_id not in self._skipped]
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._take_whole(text)
        if len(self._window) - self._whole <= _LONGEST_INCOMPLETE:
            return self._take(text, len(text.rstrip(REPLACEMENT)))
        if len(self._window) > _LONGEST_WINDOW:
            return self._take_whole(text)
        return self._take(text, len(text) - 1)

    def flush(self) -> str:
        """What is left at the end, with U+FFFD for bytes that never became a character."""
        return self._take_whole(self._decode(self._window))

    def _take(self, text: str, end: int) -> str:
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _take_whole(self, text: str) -> str:
        piece = self._take(text, len(text))
        if piece and len(self._window) > _WINDOW:
            self._shorten()
        self._whole = len(self._window)
        return piece

    def _shorten(self) -> None:
        """Keeps only the ids of the last piece, as context for the next."""
        del self._window[: self._whole]
        self._sent = len(self._decode(self._window))
