"""The ids of a text without added tokens: by a table of bytes, or by words that are remembered.

Finds special and other added tokens in a text.

Remembers what was used last, in bounded memory.
"""

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain, groupby
from os.path import commonprefix
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from tokenizers import AddedToken, Tokenizer, models

from router.text.encoding.word_patterns import Splitter, splitter_of, whole

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """A cache of at most `most_bytes`. Safe to use from several threads.

    It has two generations. What is found in the older one moves to the newer one, and when that is full it becomes the
    older one, whose entries are dropped. So an entry that is in use stays, and finding one in the newer generation
    writes nothing. Entries over a sixteenth of the size are not kept.
    """

    def __init__(
        self,
        most_bytes: int,
        size_of: Callable[[Key, Value], int],
        new_generation: Callable[[], dict[Key, Value]] = dict,
    ) -> None:
        self._generation_bytes = most_bytes // 2
        self._size_of = size_of
        self._new_generation = new_generation
        self._writing = Lock()
        self.newer = new_generation()
        self._older = new_generation()
        self._newer_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self.newer or key in self._older

    def get(self, key: Key) -> Value | None:
        """The value, or None."""
        value = dict.get(self.newer, key)
        if value is None and (value := dict.get(self._older, key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Remembers the value."""
        size = self._size_of(key, value)
        if size > self._generation_bytes // 8:
            return
        with self._writing:
            if self._newer_bytes + size > self._generation_bytes:
                self._older, self.newer, self._newer_bytes = self.newer, self._new_generation(), 0
            self.newer[key] = value
            self._newer_bytes += size


_MOST_WORD_BYTES = 8 * 2**20
_LONGEST_WORD = 64  # of those remembered, in characters
_WORD_OVERHEAD, _ID_BYTES = 250, 40  # of a str, a tuple and a place in a dict; of an int and its place in a tuple
_MANY_BYTES = 64 * 1024  # the interpreter's lock is held for a third of a millisecond
_MANY_CHARACTERS = 8 * 1024  # and here for half a millisecond
_PROBE = 512  # characters of a long text that show whether its words are unusual
_MOST_SKIPPED = 15  # texts after such a text, and after more of them

# The model takes as long as the library for new words of about this many tokens: random letters have more.
_USUAL_TOKENS = 2
SPARE_TOKENS = 8
_CHARACTERS_A_SPARE_TOKEN = 64
_CHARACTERS_A_TOKEN = 4  # of long words, which are not remembered
_SMALL_VOCABULARY = 4096  # whose JSON is soon read


def _byte_characters() -> list[str]:
    """The printable character that byte-level vocabularies have for each byte (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_CHARACTERS = dict(enumerate(_byte_characters()))


class Pieces(Protocol):
    """Encodes texts of at most `longest` characters; `only_ascii` says whether other texts are the library's."""

    longest: int
    only_ascii: bool
    is_quick: bool

    def ids(self, text: str) -> list[int] | None:
        """The ids of a text without added tokens; None if the library is quicker."""


class ByteIds:
    """One id for each byte. It is as quick as a cache would be."""

    longest = _MANY_BYTES
    is_quick = True

    def __init__(self, ids: list[int], only_ascii: bool) -> None:
        self.only_ascii = only_ascii
        self._ids = ids
        self._table = bytes(ids) if max(ids) < 256 else None

    def ids(self, text: str) -> list[int]:
        data = text.encode()
        return list(data.translate(self._table)) if self._table else list(map(self._ids.__getitem__, data))


class WordIds:
    """The ids of each word, remembered. The model is asked for words that are new, if they are few."""

    longest = _MANY_CHARACTERS
    only_ascii = True
    is_quick = False

    def __init__(self, model: models.Model, split: Splitter, spare_tokens: float) -> None:
        self._model = model
        self._split = split
        self._spare_tokens = spare_tokens
        self._known: BoundedCache[str, tuple[int, ...]] = BoundedCache(
            _MOST_WORD_BYTES, lambda word, ids: _WORD_OVERHEAD + len(word) + _ID_BYTES * len(ids), lambda: _Words(self)
        )
        self._skipped, self._to_skip = 0, 0

    def ids(self, text: str) -> list[int] | None:
        if self._to_skip > 0:  # two threads may count one down
            self._to_skip -= 1
            return None
        if len(text) > 2 * _PROBE and not self._learns(text[:_PROBE], self._split(text[:_PROBE])):
            return None
        words = self._split(text)
        known = self._known.newer
        return list(chain.from_iterable(map(known.__getitem__, words))) if self._learns(text, words) else None

    def find(self, word: str) -> tuple[int, ...]:
        """The ids of a word that is not in the newer generation."""
        ids = self._known.get(word)
        if ids is None:
            # Not `Tokenizer.encode`, which could split the word once more.
            ids = tuple(token.id for token in self._model.tokenize(word.translate(BYTE_CHARACTERS)))
            if len(word) <= _LONGEST_WORD:
                self._known.put(word, ids)
        return ids

    def _learns(self, text: str, words: list[str]) -> bool:
        """Learns what is new of a text. False if the library is quicker; then it skips the next texts, too."""
        newer = self._known.newer
        new = [word for word in set(words) if word not in newer]
        if new and not self._find_all(new, words, self._spare_tokens + len(text) // _CHARACTERS_A_SPARE_TOKEN):
            self._skipped = self._to_skip = min(2 * self._skipped + 1, _MOST_SKIPPED)
            return False
        self._skipped = 0
        return True

    def _find_all(self, new: list[str], words: list[str], spare_tokens: float) -> bool:
        """Finds new words. False if they have more than `spare_tokens` over the usual number; the others are left."""
        for word in new:
            if len(word) > _LONGEST_WORD:
                spare_tokens -= len(word) // _CHARACTERS_A_TOKEN * words.count(word)
            elif word not in self._known:
                spare_tokens -= len(self.find(word)) - _USUAL_TOKENS
            if spare_tokens < 0:
                return False
        return True


class _Words(dict[str, tuple[int, ...]]):
    """Known words. Looking up another one finds it, so that known ones cost no call of a function of Python."""

    def __init__(self, words: WordIds) -> None:
        super().__init__()
        self._find = words.find

    def __missing__(self, word: str) -> tuple[int, ...]:
        return self._find(word)


def pieces_of(tokenizer: Tokenizer, has_normalizer: bool, spare_tokens: float) -> Pieces | None:
    """The quick way for this tokenizer, which has no normalizer or NFC; None if there is none.

    With infinite `spare_tokens` it leaves no unusual text to the library.
    """
    model, pre_tokenizer = tokenizer.model, tokenizer.pre_tokenizer
    if not isinstance(model, models.BPE) or model.dropout or pre_tokenizer is None:
        return None
    split = splitter_of(json.loads(pre_tokenizer.__getstate__()))
    if split is not whole:
        return WordIds(model, split, spare_tokens) if split else None
    ids = _byte_ids(tokenizer)
    return ByteIds(ids, only_ascii=has_normalizer) if ids else None


def _byte_ids(tokenizer: Tokenizer) -> list[int] | None:
    """The id of each byte, if every byte has one and none are merged."""
    if tokenizer.get_vocab_size() > _SMALL_VOCABULARY:
        return None
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if model["merges"] or model["ignore_merges"] or any(model[name] for name in affixes):
        return None
    vocabulary: dict[str, int] = model["vocab"]
    ids = [vocabulary.get(character) for character in BYTE_CHARACTERS.values()]
    return None if None in ids else [one for one in ids if one is not None]


class AddedTokens:
    """The tokens that the library finds in a text before anything else: the leftmost, and of those the longest.

    `ids` has those for which nothing else counts than their place. The library takes white space around some others,
    or finds them only beside white space; and it finds `normalized` ones in the text that is left.
    """

    def __init__(self, tokens: Mapping[int, AddedToken], has_normalizer: bool) -> None:
        all_normalized = not has_normalizer and all(token.normalized for token in tokens.values())
        self.ids = {
            token.content: token_id
            for token_id, token in tokens.items()
            if not (token.lstrip or token.rstrip or token.single_word) and (all_normalized or not token.normalized)
        }
        contents = [token.content for token in tokens.values()]
        self._split = re.compile(f"({_longest_of(contents)})").split if contents else None

    def split(self, text: str) -> list[str]:
        """A text without added tokens as a list of one; else the text before a token, the token, the text after it,
        the next token, and so on."""
        return self._split(text) if self._split else [text]


def _longest_of(words: Sequence[str]) -> str:
    """A pattern that matches the longest of the words. Common beginnings are compared once."""
    alternatives = []
    for _, group in groupby(sorted(filter(None, words)), lambda word: word[0]):
        same = list(group)
        begin = commonprefix(same)  # noqa: RUF071 (of texts, not of paths)
        rest = [word[len(begin) :] for word in same]
        alternatives.append(re.escape(begin) + (_longest_of(rest) if any(rest) else ""))
    return f"(?:{'|'.join(alternatives)}){'' if all(words) else '?'}"
