"""The ids of bad words: each way to write a word, once, without special tokens."""

from collections.abc import Sequence

import pytest
import tokenizers
from support.engines.checkpoints import DEMO
from tokenizers import models, normalizers, pre_tokenizers, processors

from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2, model_pb2
from router import validation
from router.config import LimitsConfig
from router.text.request_input import bad_sequences
from router.text.served_model import ServedModel
from router.text.tokenizer import Tokenizer

LIBRARY = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
LIMITS = model_pb2.ModelLimits(max_context_tokens=100, vocab_size=1000)


def served(tokenizer_json: bytes | None) -> ServedModel:
    tokenizer = None if tokenizer_json is None else Tokenizer(tokenizer_json, "", "")
    return ServedModel("m", LIMITS, model_pb2.ModelCapabilities(), frozenset(), tokenizer)


def request(words: Sequence[str]) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(token_ids={"ids": [5]}, sampling={"bad_words": words})


def test_a_word_is_banned_as_it_is_and_after_a_space() -> None:
    model = served((DEMO / "tokenizer.json").read_bytes())
    found = bad_sequences(request(["fox", "fox", " fox"]), model)
    texts = ["fox", " fox", "  fox"]
    assert found == tuple(tuple(LIBRARY.encode(text, add_special_tokens=False).ids) for text in texts)
    assert bad_sequences(request([]), model) == ()


def test_special_tokens_are_not_part_of_a_word_and_one_that_vanishes_is_refused() -> None:
    small = tokenizers.Tokenizer(models.WordLevel({"[S]": 0, "fox": 1, "a": 2, "[U]": 3}, unk_token="[U]"))
    small.normalizer = normalizers.Strip()
    small.pre_tokenizer = pre_tokenizers.Whitespace()
    small.post_processor = processors.TemplateProcessing(single="[S] $A", special_tokens=[("[S]", 0)])
    model = served(small.to_str().encode())
    # With and without the space, the ids are the same.
    assert bad_sequences(request(["a fox", "fox"]), model) == ((2, 1), (1,))
    with pytest.raises(InvalidRequest) as refused:
        bad_sequences(request(["fox", " "]), model)
    assert [violation.field for violation in refused.value.violations] == ["sampling.bad_words[1]"]


def test_a_model_without_a_tokenizer_has_no_bad_words() -> None:
    with pytest.raises(Unsupported, match=r"sampling\.bad_words"):
        validation.check(request(["fox"]), served(None), LimitsConfig())
