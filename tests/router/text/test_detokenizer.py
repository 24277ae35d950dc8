"""Ids to text, piece by piece."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.small_tokenizers import (
    HELLO,
    WORD_MARK,
    WORLD,
    byte_fallback,
    byte_level,
    marked_words,
    word_pieces,
)

from router.text.detokenizer import REPLACEMENT, Detokenizer
from router.text.tokenizer import Tokenizer

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
VOCABULARY = 400
# Each with the ids that it has. Mostly bytes of characters with byte fallback, so that many are whole.
KINDS = {
    "byte level": (BYTE_LEVEL, st.integers(0, VOCABULARY - 1)),
    "byte fallback": (
        BYTE_FALLBACK,
        st.one_of(
            st.integers(0, WORD_MARK + 6),
            st.integers(WORD_MARK, WORD_MARK + 6),
            st.sampled_from([2 + byte for byte in " é你🎉\xff".encode()]),
        ),
    ),
    "word pieces": (word_pieces(), st.integers(0, 13)),
    "marked words": (marked_words(), st.integers(0, 8)),
}


def in_chunks(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The same ids, cut anywhere."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def decoded_by(tokenizer: Tokenizer, chunks: list[list[int]], keep_special_tokens: bool = False) -> str:
    detokenizer = tokenizer.detokenizer(keep_special_tokens)
    return "".join(detokenizer.push(chunk) for chunk in chunks) + detokenizer.flush()


def pieces(tokenizer: Tokenizer, ids: list[int], keep_special_tokens: bool = False) -> list[str]:
    """The text sent, one token at a time, and at the end."""
    detokenizer = tokenizer.detokenizer(keep_special_tokens)
    return [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.flush()]


def fallback_ids(text: bytes) -> list[int]:
    return [2 + byte for byte in text]


@pytest.mark.parametrize("text", ["héllo wörld", "你好，世界", "🎉 party 👩‍👩‍👧", "plain words", " ", "\n\n"])
def test_characters_split_over_tokens_are_never_shown_broken(text: str) -> None:
    sent = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(sent) == text
    assert not any(REPLACEMENT in piece for piece in sent)


def test_a_token_that_completes_a_character_gives_it_at_once() -> None:
    detokenizer = BYTE_LEVEL.detokenizer(False)
    ids = BYTE_LEVEL.encode("ö")
    assert [detokenizer.push([token_id]) for token_id in ids][-1] == "ö"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=48), st.booleans())
def test_pieces_of_any_ids_concatenate_to_the_decoding_of_the_whole(ids: list[int], keep_special_tokens: bool) -> None:
    assert "".join(pieces(BYTE_LEVEL, ids, keep_special_tokens)) == BYTE_LEVEL.decode(ids, keep_special_tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=5), max_size=12))
def test_the_text_does_not_depend_on_how_many_tokens_come_together(groups: list[list[int]]) -> None:
    detokenizer = BYTE_LEVEL.detokenizer(False)
    text = "".join(detokenizer.push(group) for group in groups) + detokenizer.flush()
    assert text == BYTE_LEVEL.decode([token_id for group in groups for token_id in group])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_any_chunks_of_any_ids_give_the_text_of_the_whole(
    kind: str, data: st.DataObject, keep_special_tokens: bool
) -> None:
    tokenizer, ids_of_kind = KINDS[kind]
    ids = data.draw(st.lists(ids_of_kind, max_size=60))
    text = decoded_by(tokenizer, in_chunks(data, ids), keep_special_tokens)
    assert text == tokenizer.decode(ids, keep_special_tokens)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.text(max_size=30))
def test_any_chunks_of_a_text_in_fallback_bytes_give_that_text(data: st.DataObject, text: str) -> None:
    ids = [HELLO, *fallback_ids(text.encode())]
    assert decoded_by(BYTE_FALLBACK, in_chunks(data, ids)) == "hello" + text
    assert BYTE_FALLBACK.decode(ids) == "hello" + text


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 100])
def test_a_wrong_byte_spoils_no_character_beside_it(size: int) -> None:
    ids = [*fallback_ids("你".encode() + b"\xff" + "好".encode() + b"\xe5\xa5"), WORLD]
    chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert decoded_by(BYTE_FALLBACK, chunks) == f"你{REPLACEMENT}好{REPLACEMENT} world"


def test_a_space_in_bytes_at_the_beginning_is_stripped_as_any_other() -> None:
    ids = [*fallback_ids(b"  "), HELLO]
    assert decoded_by(BYTE_FALLBACK, [[one] for one in ids]) == BYTE_FALLBACK.decode(ids) == "  hello"


def test_incomplete_bytes_at_the_end_become_replacement_characters() -> None:
    ids = BYTE_LEVEL.encode("a🦊")[:-1]
    sent = pieces(BYTE_LEVEL, ids)
    assert sent[0] == "a"
    assert sent[-1] == REPLACEMENT
    assert not any(sent[1:-1])


def test_bytes_that_are_no_character_do_not_hold_back_the_text_after_them() -> None:
    stray = BYTE_LEVEL.encode("ÿ")[-1]
    assert "".join(pieces(BYTE_LEVEL, [stray, *BYTE_LEVEL.encode("hello")])[:-1]) == REPLACEMENT + "hello"


def test_endless_garbage_is_let_go_and_costs_a_bounded_window() -> None:
    longest = 0

    def decode(ids: object) -> str:
        nonlocal longest
        longest = max(longest, len(ids))  # type: ignore[arg-type]
        return REPLACEMENT * len(ids)  # type: ignore[arg-type]

    detokenizer = Detokenizer(decode, frozenset())
    text = "".join(detokenizer.push([1]) for _ in range(5000))
    assert len(text) >= 4990
    assert longest < 100


def test_spaces_between_words_survive_a_decoder_that_strips_the_first() -> None:
    sent = "".join(pieces(BYTE_FALLBACK, [HELLO, WORLD] * 20))
    assert sent.startswith("hello world hello")
    assert sent == BYTE_FALLBACK.decode([HELLO, WORLD] * 20)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(WORD_MARK, WORD_MARK + 6), max_size=40))
def test_pieces_of_any_words_concatenate_to_the_decoding_of_the_whole(ids: list[int]) -> None:
    assert "".join(pieces(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


def test_byte_fallback_characters_are_whole() -> None:
    ids = fallback_ids("你好🎉".encode())
    sent = pieces(BYTE_FALLBACK, ids)
    assert [piece for piece in sent if piece] == ["你", "好", "🎉"]


def test_special_tokens_have_no_text_unless_they_are_kept() -> None:
    end = 1
    ids = [*BYTE_LEVEL.encode("fox"), end]
    assert "".join(pieces(BYTE_LEVEL, ids)) == "fox"
    assert "".join(pieces(BYTE_LEVEL, ids, keep_special_tokens=True)) == "fox</s>"
