"""Large bodies: read in pieces as if they were read as a whole, and their texts bounded by name."""

import json
import random
import re

import pytest

from baton.errors import InvalidRequest
from router.openai.json_body import parse
from rpc.interceptors.counting import TextLimits

PIECE = 64 * 1024
LONG = b"x" * 70_000
LIMITS = TextLimits(100_000, 150_000, frozenset({"uri"}), 400_000)


@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_large_body_is_what_it_is_as_a_whole(seed: int, *, ensure_ascii: bool) -> None:
    chance = random.Random(seed)
    letters = ["a", '"', "\\", "\n", "é", "日", "😀", "\u0001", " ", ",[{:"]

    def text(length: int) -> str:
        return "".join(chance.choices(letters, k=length))

    value = {
        "a": text(chance.choice([10, 63, 65, PIECE, 3 * PIECE])),
        "b": [text(chance.choice([3, 100, PIECE + 1])) for _ in range(5)],
        text(80): {"number": 1.5, "none": None},
        "c": "end" * PIECE,
    }
    body = b" " * seed + json.dumps(value, ensure_ascii=ensure_ascii, indent=seed % 3 or None).encode()
    assert parse(body) == value


def test_a_pair_of_surrogates_is_one_character_wherever_a_piece_ends() -> None:
    for before in range(13):
        body = b'{"a": "' + b"x" * before + rb"\ud83d\ude00" * 20_000 + b'"}'
        assert parse(body)["a"] == "x" * before + "😀" * 20_000


BAD = {
    "a constant before": b'{"b": -Infinity, "a": "' + LONG + b'"}',
    "a constant behind": b'{"a": "' + LONG + b'", "b": -Infinity}',
    "another constant": b'{"a": "' + LONG + b'", "b": NaN}',
    "no end": b'{"a": "' + LONG,
    "an escape at the end": b'{"a": "' + LONG + b"\\",
    "no comma": b'{"a": "' + LONG + b'" "b": 1}',
    "a string alone": b'"' + LONG + b'"',
    "two strings": b'"' + LONG + b'""' + LONG + b'"',
    "quotes": b'"' * 70_000,
    "half of a pair": b'{"a": "\\ud83d", "b": "' + LONG + b'"}',
    "half of a pair in a name": b'{"\\ud83d": "' + LONG + b'"}',
    "half of a pair in a long string": b'{"a": "' + LONG + b'\\ud83d"}',
    "no UTF-8": b'{"a": "' + b"\x80" * 70_000 + b'"}',
    "a line break": b'{"a": "\n' + LONG + b'"}',
    "spaces": b'{"a": ' + b" " * 2**22 + b"1}",
    "a long name": b'{"' + b"a" * 2**22 + b'": 1}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_large_body_that_is_wrong_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(BAD[name])
    assert refused.value.violations[0].field == "body"


TOO_LONG = {
    "prompt": {"prompt": "x" * 100_001},
    "messages[1].content": {"messages": [{"content": "x" * 100_000}, {"content": "x" * 60_000}]},
    "data:": {"data:": "data:" + "x" * 100_000},
    "url": {"url": "data:" + "x" * 400_000},
    "source.data": {"source": {"type": "base64", "data": "x" * 400_001}},
    "input.data": {"input": {"data": "x" * 100_001}},
    "input[1].data": {"input": [{"data": "x" * 100_000}, {"data": "x" * 60_000}]},
}


@pytest.mark.parametrize("field", TOO_LONG)
def test_a_text_over_the_limit_is_named(field: str) -> None:
    with pytest.raises(InvalidRequest, match="is too long") as refused:
        parse(json.dumps(TOO_LONG[field]).encode(), LIMITS)
    assert refused.value.violations[0].field == field


def test_texts_are_counted_in_characters_and_images_apart() -> None:
    source = {"type": "base64", "data": "x" * 390_000}
    value = {"prompt": "日" * 100_000, "image_url": {"url": "data:" + "x" * 390_000}, "source": source}
    assert parse(json.dumps(value).encode(), LIMITS) == value


@pytest.mark.parametrize("long", [b"short", LONG], ids=["small", "large"])
@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"a": 1, "b": "%s", "a": 2}', "a"),
        (b'{"a": [{"b": "%s"}, {"c": {"d": 1, "d": 1}}]}', "a[1].c.d"),
        (b'{"a": {"%s": 1, "b": 1, "\\u0062": 1}}', "a.b"),
    ],
)
def test_a_name_that_is_given_more_than_once_is_refused_by_its_path(body: bytes, path: str, long: bytes) -> None:
    with pytest.raises(InvalidRequest, match=rf"{re.escape(path)}: is given more than once"):
        parse(body % long)
