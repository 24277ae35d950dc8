"""Our patterns split ASCII text into the same words as the library's."""

import json
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from support.engines.small_tokenizers import PRE_TOKENIZERS
from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from router.text.encoding.pieces import BYTE_CHARACTERS
from router.text.encoding.word_patterns import PATTERNS, Splitter, splitter_of

# Letters by case and in contractions, digits, white space, white space only for Python, and symbols.
KINDS = ("a", "S", "l", "'", "0", " ", "\t", "\n", "\r", "\x1c", "/", "_")
GPT2, LLAMA3 = [patterns[0] for patterns in PATTERNS][:2]
DEEPSEEK = [*PATTERNS][-1]


def state(pre_tokenizer: PreTokenizer) -> Mapping[str, Any]:
    return json.loads(pre_tokenizer.__getstate__())


def splitter(pre_tokenizer: PreTokenizer) -> Splitter:
    found = splitter_of(state(pre_tokenizer))
    assert found is not None
    return found


def by_library(pre_tokenizer: PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_all_short_texts_of_all_kinds_of_characters_are_split_alike(name: str) -> None:
    pre_tokenizer = PRE_TOKENIZERS[name]
    split = splitter(pre_tokenizer)
    for length in range(1, 5):
        for characters in product(KINDS, repeat=length):
            text = "".join(characters)
            assert [word.translate(BYTE_CHARACTERS) for word in split(text)] == by_library(pre_tokenizer, text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_all_pairs_of_ascii_characters_are_split_alike(name: str) -> None:
    pre_tokenizer = PRE_TOKENIZERS[name]
    split = splitter(pre_tokenizer)
    for pair in product(map(chr, range(128)), repeat=2):
        # Beside letters and digits, and alone.
        for text in ("".join(pair), "a{}{}b".format(*pair), "7{}{}8".format(*pair), " {}{} ".format(*pair)):
            assert [word.translate(BYTE_CHARACTERS) for word in split(text)] == by_library(pre_tokenizer, text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_ascii_text_is_split_without_loss(name: str) -> None:
    text = "".join(map(chr, range(128))) * 2
    assert "".join(splitter(PRE_TOKENIZERS[name])(text)) == text


def test_a_pattern_may_also_be_written_as_what_not_to_remove() -> None:
    removing = Sequence([Split(Regex(LLAMA3), "removed", invert=True), ByteLevel(False, use_regex=False)])
    text = "It's 12345  words\n\n of WE'LL"
    assert [word.translate(BYTE_CHARACTERS) for word in splitter(removing)(text)] == by_library(removing, text)


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Whitespace(),
        Sequence([]),
        Sequence([pre_tokenizers.Punctuation(), ByteLevel(False)]),
        Sequence([pre_tokenizers.Digits(individual_digits=False), ByteLevel(False)]),
        Sequence([Split(Regex(r"\p{L}+"), "isolated"), ByteLevel(False, use_regex=False)]),
        Sequence([Split(Regex(LLAMA3), "isolated"), ByteLevel(False, use_regex=True)]),
        Sequence([Split(Regex(LLAMA3), "merged_with_previous"), ByteLevel(False, use_regex=False)]),
        Sequence([Split(Regex(LLAMA3), "isolated", invert=True), ByteLevel(False, use_regex=False)]),
        Sequence([Split(Regex(LLAMA3), "isolated"), Split(Regex(GPT2), "isolated"), ByteLevel(False, use_regex=False)]),
        Sequence([*(Split(Regex(one), "removed", invert=True) for one in DEEPSEEK), ByteLevel(False, use_regex=False)]),
        Sequence([Split(LLAMA3, "isolated"), ByteLevel(False, use_regex=False)]),
        Sequence([ByteLevel(False), Split(Regex(LLAMA3), "isolated")]),
    ],
    ids=lambda pre_tokenizer: pre_tokenizer.__getstate__().decode()[:60],
)
def test_other_ways_of_splitting_are_left_to_the_library(pre_tokenizer: PreTokenizer) -> None:
    assert splitter_of(state(pre_tokenizer)) is None
