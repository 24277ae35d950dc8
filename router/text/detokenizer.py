"""Converts ids to text incrementally. A character split over tokens is held back until it is complete."""

import codecs
from collections.abc import Callable, Collection, Iterator, Sequence

from router.text.token_messages import REPLACEMENT, TokenTexts

# A character has at most four bytes: three tokens may be an incomplete one, four cannot.
_LONGEST_INCOMPLETE = 3
_WINDOW = 8
# Bytes that never form a character are released after this many tokens, which bounds the cost of a step.
_LONGEST_WINDOW = 64
# More at once would fill the window, and release the beginning of a character that is complete with the next id.
_MOST_TOGETHER = 32


class ByteTokens:
    """The tokens of a byte-fallback vocabulary for single bytes. `ids` are those of the bytes 0 to 255.

    The library decodes a run of such tokens as a whole: one wrong or missing byte spoils all characters of the run.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)
        self.values = {token_id: byte for byte, token_id in enumerate(ids)}

    def of(self, text: str) -> list[int]:
        """The ids that spell a text in UTF-8."""
        return [self._ids[byte] for byte in text.encode()]


class WholeCharacters:
    """Passes byte tokens on by complete characters only. Bytes that form no character become U+FFFD."""

    def __init__(self, tokens: ByteTokens) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> Iterator[int]:
        """The ids that can be passed on now."""
        for token_id in ids:
            byte = self._tokens.values.get(token_id)
            if byte is not None:
                yield from self._tokens.of(self._utf8.decode(bytes((byte,))))
            else:
                yield from self.flush()
                yield token_id

    def flush(self) -> list[int]:
        """The ids for an incomplete character at the end."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return self._tokens.of(rest)


class Detokenizer:
    """The text of a growing sequence of ids, in pieces that add up to the decoding of the whole.

    Decodes a short window that starts at a complete character, since a token's text may depend on the one before it:
    some decoders strip the first space. Ids in `skipped` have no text. `byte_tokens` are those of a byte-fallback
    vocabulary. With `texts`, where no token's text depends on others, whole characters need no window. Do not use it
    after `flush`.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skipped: Collection[int],
        byte_tokens: ByteTokens | None = None,
        texts: TokenTexts | None = None,
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self.texts = texts
        self._characters = WholeCharacters(byte_tokens) if byte_tokens else None
        self._window: list[int] = []
        self._whole = 0  # ids of the window up to its last complete character
        self._sent = 0  # characters of the window's text that were returned

    @property
    def is_whole(self) -> bool:
        """True if no character is incomplete, and the text of the next token is its own."""
        return self.texts is not None and not self._window

    def whole_text(self, ids: Sequence[int]) -> str | None:
        """The text of the next ids, if each of them is whole characters by itself, so that `push` need not see them."""
        if self.texts is None or self._window:
            return None
        found = [self.texts[token_id] for token_id in ids]
        pieces = [text for text in found if text is not None]
        return "".join(pieces) if len(pieces) == len(found) else None

    def push_one(self, token_id: int) -> str:
        """`push` for one id."""
        if self.texts is not None and not self._window:
            text = self.texts[token_id]
            if text is not None:
                return text
        return self._push((token_id,))

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a character is incomplete."""
        count = len(ids)
        if count == 1:
            return self.push_one(ids[0])
        if (text := self.whole_text(ids)) is not None:
            return text
        return "".join(map(self.push_one, ids)) if count > _MOST_TOGETHER else self._push(ids)

    def _push(self, ids: Sequence[int]) -> str:
        shown = [token_id for token_id in ids if token_id not in self._skipped]
        if self._characters:
            self._window += self._characters.push(shown)
            return self._emit_whole(self._decode(self._window))
        self._window += shown
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = self._emit_whole(text)
            if self.texts is not None:
                self._window.clear()
                self._whole = self._sent = 0
            return piece
        if len(self._window) - self._whole <= _LONGEST_INCOMPLETE:
            return self._emit(text, len(text.rstrip(REPLACEMENT)))
        if len(self._window) > _LONGEST_WINDOW:
            return self._emit_whole(text)
        return self._emit(text, len(text) - 1)

    def flush(self) -> str:
        """The rest of the text, with U+FFFD for bytes that form no character."""
        if self._characters:
            self._window += self._characters.flush()
        return self._emit_whole(self._decode(self._window)) if self._window else ""

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _emit_whole(self, text: str) -> str:
        piece = self._emit(text, len(text))
        if piece and len(self._window) > _WINDOW:
            self._shorten()
        self._whole = len(self._window)
        return piece

    def _shorten(self) -> None:
        """Keeps only the ids of the last piece, as context for the next."""
        del self._window[: self._whole]
        self._sent = len(self._decode(self._window))
