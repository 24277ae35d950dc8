"""Token ids of texts, equal to those of the `tokenizers` library."""

import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import structlog
from tokenizers import Tokenizer

from router.text.encoding.pieces import SPARE_TOKENS, AddedTokens, BoundedCache, Pieces, pieces_of

_MOST_SEGMENT_BYTES = 16 * 2**20
_SEGMENT_OVERHEAD = 300  # of an array and a place in a dict

# Characters of each kind that some pattern tells from others, and contractions.
_KINDS = (*"aS'0 \t\n\r\x0b\x1c\x1f/<_\x00\x7f", "'ll", "'RE")
_SAMPLES = (
    "",
    "The quick brown fox jumps over 13 lazy dogs.  It didn't care; WE'LL see, won't we?\n\n\tdef f(x):\r\n    pass\n",
    "camelCase HTTPServer snake_case 1234567 3.14159 a/b//c https://example.org/?q=1&r=%20#top",
    "déjà vu, 你好 🎉 nai\u0308ve ﬁ K ſ's \u00a0\u0085\u2028 x",
)

log = structlog.get_logger(__name__)


class Encoder:
    """Encodes texts as `tokenizer.encode_batch_fast` does. Safe to use from several threads.

    The tokenizer must not be changed from then on.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._quick = _quick_encoder(tokenizer) if _agrees(tokenizer) else None

    @property
    def is_quick(self) -> bool:
        """True if it has a quicker way than the library."""
        return self._quick is not None

    def encode(self, text: str, *, add_special_tokens: bool, salt: str = "") -> list[int]:
        """The ids. What is remembered of texts with a salt is used only for texts with the same one."""
        if self._quick is not None:
            return self._quick.encode(text, add_special_tokens, salt)
        return library_ids(self._tokenizer, text, add_special_tokens)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around it."""
        if self._quick is not None:
            return [self._quick.encode(text, add_special_tokens=False, salt="") for text in texts]
        return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def library_ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The ids by the library alone. Only its batch methods release the GIL."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


@dataclass(frozen=True, slots=True)
class _Around:
    """The ids that the library adds before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class _QuickEncoder:
    """Splits a text at its added tokens, as the library does, and encodes the segments between them one by one.

    The ids of segments are remembered if the text has added tokens: the next turn of a conversation has them again.
    """

    def __init__(self, tokenizer: Tokenizer, added: AddedTokens, pieces: Pieces, around: _Around) -> None:
        self._tokenizer = tokenizer
        self.added = added
        self._pieces = pieces
        self._around = around
        self._segments: BoundedCache[str | tuple[str, str], array[int]] = BoundedCache(
            _MOST_SEGMENT_BYTES, _segment_size
        )

    def encode(self, text: str, add_special_tokens: bool, salt: str) -> list[int]:
        """The ids. Segments with different salts share nothing."""
        parts = self.added.split(text)
        if len(parts) == 1:
            ids = self._encode_segment(text)
        elif all(map(self.added.ids.__contains__, parts[1::2])):
            ids = self._join(parts, salt)
        else:
            return library_ids(self._tokenizer, text, add_special_tokens)
        return [*self._around.before, *ids, *self._around.after] if add_special_tokens else ids

    def _join(self, parts: list[str], salt: str) -> list[int]:
        ids: list[int] = []
        tokens = iter(parts[1::2])
        for segment in parts[::2]:
            if segment:
                ids.extend(self._recall(segment, salt))
            if token := next(tokens, ""):
                ids.append(self.added.ids[token])
        return ids

    def _recall(self, segment: str, salt: str) -> "list[int] | array[int]":
        if self._pieces.is_quick:
            return self._encode_segment(segment)
        key = (salt, segment) if salt else segment
        known = self._segments.get(key)
        if known is not None:
            return known
        ids = self._encode_segment(segment)
        self._segments.put(key, array("I", ids))
        return ids

    def _encode_segment(self, text: str) -> list[int]:
        pieces = self._pieces
        ids = None
        if len(text) <= pieces.longest and (text.isascii() or not pieces.only_ascii):
            ids = pieces.ids(text)
        return library_ids(self._tokenizer, text, add_special_tokens=False) if ids is None else ids


def _agrees(tokenizer: Tokenizer) -> bool:
    """True if the quick way, if there is one, gives the library's ids for texts of all kinds. Takes milliseconds."""
    try:
        quick = _quick_encoder(tokenizer, spare_tokens=math.inf)
        if quick is None:
            return False
        for text, add_special_tokens in _samples(quick.added):
            if quick.encode(text, add_special_tokens, "") != library_ids(tokenizer, text, add_special_tokens):
                log.warning("texts are encoded by the library, since the quick way differs", text=text[:100])
                return False
    except Exception as error:  # the library's, for a character without a token; too much recursion
        log.warning("texts are encoded by the library, since comparing failed", reason=str(error))
        return False
    return True


def _quick_encoder(tokenizer: Tokenizer, spare_tokens: float = SPARE_TOKENS) -> _QuickEncoder | None:
    normalizer = _state(tokenizer.normalizer)
    around = _around(_state(tokenizer.post_processor))
    if around is None or normalizer.get("type", "NFC") != "NFC":  # NFC changes no ASCII text
        return None
    pieces = pieces_of(tokenizer, bool(normalizer), spare_tokens)
    if pieces is None:
        return None
    added = AddedTokens(tokenizer.get_added_tokens_decoder(), has_normalizer=bool(normalizer))
    return _QuickEncoder(tokenizer, added, pieces, around)


def _state(component: Any) -> Mapping[str, Any]:
    """A part of a tokenizer in the form of tokenizer.json; empty for None."""
    return json.loads(component.__getstate__()) if component is not None else {}


def _around(processor: Mapping[str, Any]) -> _Around | None:
    """The ids that a post-processor adds around a single text; None if they are not known."""
    steps = processor.get("processors") if processor.get("type") == "Sequence" else [processor]
    templates = [step for step in steps or () if step and step.get("type") != "ByteLevel"]  # which moves only offsets
    match templates:
        case []:
            return _Around()
        case [{"type": "TemplateProcessing", "single": [*places], "special_tokens": tokens}]:
            return _around_template(places, tokens)
    return None


def _around_template(places: list[dict[str, Any]], tokens: Mapping[str, Any]) -> _Around | None:
    texts = [index for index, place in enumerate(places) if "Sequence" in place]
    if len(texts) != 1 or places[texts[0]]["Sequence"]["id"] != "A":
        return None
    ids = [() if "Sequence" in place else tuple(tokens[place["SpecialToken"]["id"]]["ids"]) for place in places]
    return _Around(sum(ids[: texts[0]], ()), sum(ids[texts[0] :], ()))


def _samples(added: AddedTokens) -> Iterator[tuple[str, bool]]:
    """Texts of all kinds of characters side by side, and added tokens among them; and whether with special tokens."""
    yield from product(_SAMPLES, (False, True))
    for kind in _KINDS:
        yield "".join(map("".join, product((kind,), _KINDS, _KINDS))), True
    for token in sorted(added.ids)[:8]:
        yield f"{token}{token} {_SAMPLES[1]} {token}\n{token[:-1]}{token}{_SAMPLES[3]}{token}", False


def _segment_size(key: str | tuple[str, str], ids: "array[int]") -> int:
    texts = key if isinstance(key, tuple) else (key,)
    return _SEGMENT_OVERHEAD + sum(map(sys.getsizeof, texts)) + ids.itemsize * len(ids)
