"""Finds special and other added tokens in a text."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from os.path import commonprefix

from tokenizers import AddedToken


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
