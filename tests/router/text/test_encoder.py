"""Texts get the ids that the library gives them, whatever the tokenizer, the text, and the texts before it."""

import json
import random
import string
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.engines.checkpoints import DEMO
from support.engines.small_tokenizers import PRE_TOKENIZERS, trained
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel

from router.text.encoding import word_patterns
from router.text.encoding.encoder import Encoder
from services.engines.simulated.tokens import byte_vocabulary

BOS, START, END = "<|bos|>", "<|start|>", "<|end|>"
PLAIN = [AddedToken(text, special=True, normalized=False) for text in (BOS, START, END, "<|end|>x", "<tool>")]
ODD = [
    AddedToken("<|left|>", lstrip=True, normalized=False),
    AddedToken("<|right|>", rstrip=True, normalized=False),
    AddedToken("<|alone|>", single_word=True, normalized=False),
    AddedToken("<|loose|>", normalized=True),
    AddedToken("end|>x<|", normalized=True),
    AddedToken("\u00e9", normalized=True),
    AddedToken("  ", normalized=True),
]
LOOSE = [AddedToken(text, normalized=True) for text in (BOS, "<|loose|>", "  ", "   ", "he")]
FRAGMENTS = (
    *(token.content for token in [*PLAIN, *ODD]),
    *(
        "<|",
        "|>",
        "<|end",
        "end|>",
        "'s",
        "'RE",
        "it's",
        "WE'LL",
        "he",
        "The",
        " router",
        " Worker",
        "HTTPServer",
        "a_b",
    ),
    *(
        "123",
        "4567",
        " 8",
        "    ",
        "\t\t",
        "\n\n",
        "\r\n",
        " \n ",
        "\x1c",
        "\x1f",
        "\x85",
        "\u00a0",
        "\x00",
        "\x7f",
        "//",
    ),
    *(
        "\u00e9",
        "e\u0301",
        "\u4f60\u597d",
        "\U0001f389",
        "\ufb01",
        "\u017f",
        "\u212a",
        "x" * 70,
        "()[]{}",
        "...",
        "/\n",
    ),
)
TEXTS = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(max_codepoint=127), max_size=6), st.text(max_size=2)),
    max_size=25,
).map("".join)


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """A template like Llama 3's: its beginning, and here an end too."""
    ids = [(BOS, tokenizer.token_to_id(BOS)), (END, tokenizer.token_to_id(END))]
    template = processors.TemplateProcessing(single=f"{BOS} $A {END}", special_tokens=ids)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


@cache
def trained_json(name: str) -> str:
    return trained(PRE_TOKENIZERS[name]).to_str()


def merging(name: str, tokens: Sequence[AddedToken] = PLAIN) -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained_json(name))
    tokenizer.add_tokens([*tokens])
    return tokenizer


def composed(tokens: Sequence[AddedToken]) -> Tokenizer:
    """A tokenizer like Qwen's: with NFC."""
    tokenizer = merging("Qwen 2", [])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([*tokens])
    return tokenizer


def bytes_alone(shift: int = 0) -> Tokenizer:
    characters = [chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 512))][:256]
    tokenizer = Tokenizer(models.BPE({character: shift + rank for rank, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(PLAIN)
    return tokenizer


QUICK: dict[str, Callable[[], Tokenizer]] = {
    **{name: (lambda name=name: with_bos(merging(name))) for name in PRE_TOKENIZERS},
    "odd tokens": lambda: merging("Llama 3", [*PLAIN, *ODD]),
    "loose tokens": lambda: merging("GPT-2", LOOSE),
    "NFC": lambda: with_bos(composed(PLAIN)),
    "NFC, odd tokens": lambda: composed([*PLAIN, *ODD]),
    "NFC, loose tokens": lambda: composed([*LOOSE, AddedToken("e", normalized=True)]),
    "no added tokens": lambda: merging("Qwen 2", []),
    "bytes": bytes_alone,
    "bytes, larger ids": lambda: with_bos(bytes_alone(shift=1000)),
    "the simulated engine": lambda: Tokenizer.from_buffer(byte_vocabulary(images=True).files.tokenizer_json),
    "the demo": lambda: Tokenizer.from_file(str(DEMO / "tokenizer.json")),
}


@cache
def quick(name: str) -> tuple[Tokenizer, Encoder]:
    # Read again, as a card's tokenizer is.
    library = Tokenizer.from_str(QUICK[name]().to_str())
    return library, Encoder(library)


def assert_equal(library: Tokenizer, encoder: Encoder, text: str, salt: str = "") -> None:
    for special in (False, True):
        expected = library.encode_batch_fast([text], add_special_tokens=special)[0].ids
        assert encoder.encode(text, add_special_tokens=special, salt=salt) == expected, text


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_any_text_gets_the_librarys_ids(name: str, text: str) -> None:
    library, encoder = quick(name)
    assert encoder.is_quick
    assert_equal(library, encoder, text)
    assert_equal(library, encoder, text, salt="a tenant")
    assert encoder.encode_all([text, ""]) == [library.encode(text, add_special_tokens=False).ids, []]


@pytest.mark.parametrize("name", QUICK)
def test_added_tokens_get_the_librarys_ids_beside_anything(name: str) -> None:
    library, encoder = quick(name)
    beside = ("", " ", "a", "\n ", "\u00e9", "<|", BOS)
    for token in {token.content for token in [*PLAIN, *ODD, *LOOSE]}:
        for before, after in product(beside, repeat=2):
            assert_equal(library, encoder, f"{before}{token}{after}")
            assert_equal(library, encoder, f"{before}{token}{token[:-1]}{token}{after}")


@pytest.mark.parametrize("name", QUICK)
def test_texts_of_every_length_get_the_librarys_ids(name: str) -> None:
    library, encoder = quick(name)
    chance = random.Random(name)
    page = "It's a router's README; see https://example.org/a-b_c?d=1, \u00e9t\u00e9.\n\n\tfor x in range(10):\n" * 1000
    for length in (1, 63, 64, 65, 512, 1024, 1025, 8192, 8193, *([65536, 65537] if "bytes" in name else [])):
        letters = "".join(chance.choices(string.ascii_letters, k=length))
        symbols = "".join(map(chr, chance.choices(range(128), k=length)))
        for text in (page[:length], page[:length].replace("\u00e9", "e"), letters, symbols, " " * length, "a" * length):
            assert_equal(library, encoder, text)


@pytest.mark.parametrize("name", QUICK)
def test_each_turn_of_a_conversation_gets_the_librarys_ids(name: str) -> None:
    library, encoder = quick(name)
    text = ""
    for turn in range(20):
        accents = " \u00e9" * (turn % 3)
        text += f"{START}user\nWhat's {turn} times {turn}?{accents}{END}\n{START}assistant\n"
        assert_equal(library, encoder, text)
        text += f"It's {turn * turn}.\n\n  - that is all{END}\n"


def test_what_is_forgotten_meanwhile_gets_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.encoding.pieces._MOST_WORD_BYTES", 10_000)
    monkeypatch.setattr("router.text.encoding.encoder._MOST_SEGMENT_BYTES", 10_000)
    library = merging("Llama 3")
    encoder = Encoder(library)
    assert encoder.is_quick
    chance = random.Random(0)
    words = [
        f" {word}{end}" for word in ("the", "router", "worker", "token") for end in ("", "s", "'ll", "_x", ".", ",")
    ]
    for _ in range(500):
        text = "".join(chance.choices(words, k=chance.randrange(60)))
        assert_equal(library, encoder, text)
        assert_equal(library, encoder, f"{text[:50]}{START}{text}{END}")


def test_threads_may_share_an_encoder() -> None:
    library, encoder = quick("Qwen 2")
    texts = [f"{START}{n % 7} don't  panic{' x' * (n % 50)} {n}{END}\n" * (n % 5 + 1) for n in range(400)]
    expected = [library.encode(text).ids for text in texts]
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda text: encoder.encode(text, add_special_tokens=True), texts * 5)
        assert list(found) == expected * 5


def test_an_answer_may_be_changed_by_its_owner() -> None:
    library, encoder = quick("Llama 3")
    text = f"{START}the worker{END}the router"
    for _ in range(3):
        encoder.encode(text, add_special_tokens=False).clear()
    assert_equal(library, encoder, text)


def other(name: str) -> Tokenizer:
    """Tokenizers that are left to the library."""
    tokenizer = merging("GPT-2")
    match name:
        case "a space at the beginning":
            tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
        case "words":
            tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        case "no words":
            tokenizer.pre_tokenizer = None
        case "lower case":
            tokenizer.normalizer = normalizers.Lowercase()
        case "NFKC":
            tokenizer.normalizer = normalizers.NFKC()
        case "two texts":
            tokenizer.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
        case "BERT's ends":
            tokenizer.post_processor = processors.BertProcessing((END, 1), (START, 2))
        case "merges of whole texts":
            tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        case "tokens that begin with each other":
            tokenizer.add_tokens([AddedToken("a" * length, normalized=False) for length in range(2, 1500)])
        case "chance":
            described = json.loads(tokenizer.to_str())
            described["model"]["dropout"] = 1.0
            tokenizer = Tokenizer.from_str(json.dumps(described))
        case "another model":
            tokenizer.model = models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    return tokenizer


@pytest.mark.parametrize(
    "name",
    [
        *("a space at the beginning", "words", "no words", "lower case", "NFKC", "two texts", "BERT's ends"),
        *("merges of whole texts", "tokens that begin with each other", "chance", "another model"),
    ],
)
def test_other_tokenizers_are_the_librarys(name: str) -> None:
    library = other(name)
    encoder = Encoder(library)
    assert not encoder.is_quick
    for text in ("", "The router's  WORKERS\n\n", f"a {START}b{END} \u00e9"):
        assert_equal(library, encoder, text)
    texts = ["The router", "", "a"]
    assert encoder.encode_all(texts) == [library.encode(text, add_special_tokens=False).ids for text in texts]


def test_a_tokenizer_that_refuses_some_texts_still_encodes_the_others() -> None:
    library = Tokenizer(models.BPE({"a": 0, "b": 1}, [], unk_token="[UNK]"))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    with capture_logs() as logs:
        encoder = Encoder(library)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert_equal(library, encoder, "ab")
    with pytest.raises(Exception, match="Unk token"):
        encoder.encode("x", add_special_tokens=False)


def test_a_quick_way_that_differs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as with a library whose white space is not what it was."""
    library = merging("Qwen 2")
    wrong = {library: ours.replace(r"\t-\r ", r"\s") for library, ours in word_patterns.PATTERNS.items()}  # Python's
    monkeypatch.setattr(word_patterns, "PATTERNS", wrong)
    with capture_logs() as logs:
        encoder = Encoder(library)
    assert not encoder.is_quick
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert_equal(library, encoder, "a\x1cb")


def test_segments_of_texts_with_different_salts_are_remembered_apart() -> None:
    encoder = Encoder(merging("GPT-2"))
    assert encoder._quick is not None
    for salt in ("", "one", "two"):
        encoder.encode(f"a secret{END}", add_special_tokens=False, salt=salt)
    assert {*encoder._quick._segments.newer} == {"a secret", ("one", "a secret"), ("two", "a secret")}
