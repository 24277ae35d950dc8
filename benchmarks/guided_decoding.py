"""Guided decoding: the times to compile grammars and to compute masks, with llguidance and, if installed, xgrammar.

`python benchmarks/guided_decoding.py [--rounds N]`. Two vocabularies: that of the demonstration model, and a made-up
one of 128,000 tokens. Each schema is followed along one valid document, so that both libraries do the same.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo" / "tokenizer.json"
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_FIELDS = {f"field_{index}": {"type": ["string", "null"], "maxLength": 100} for index in range(100)}
_WIDE = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False}
_ENUM = {
    "type": "object",
    "properties": {"code": {"enum": [f"code number {index}" for index in range(2000)]}},
    "required": ["code"],
}

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "person": (_PERSON, {"name": "Mia Fox", "age": 31, "email": "mia@example.com", "tags": ["a", "b c"]}),
    "tree": (_TREE, {"value": 1, "children": [{"value": 22, "children": []}, {"value": 3, "children": []}]}),
    "100 properties": (_WIDE, dict.fromkeys(_FIELDS, "some text")),
    "enum of 2000": (_ENUM, {"code": "code number 1234"}),
}


def large_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level vocabulary of 128,000: bytes, then made-up words, with and without a space before them."""
    chooser = random.Random(1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    while len(vocabulary) < 127_999:
        word = "".join(chooser.choices(letters, weights=range(26, 0, -1), k=chooser.randint(2, 9)))
        shape = chooser.random()
        word = (
            word
            if shape < 0.3
            else f"Ġ{word}"
            if shape < 0.8
            else word.title()
            if shape < 0.95
            else str(chooser.randrange(1000))
        )
        vocabulary.setdefault(word, len(vocabulary))
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


class LlGuidance:
    """The library that Baton uses, with Baton's limits."""

    name = "llguidance"

    def __init__(self, tokenizer: tokenizers.Tokenizer, end: int) -> None:
        from services.engines.base import ModelFiles
        from services.engines.pytorch.guidance.vocabulary import open_vocabulary

        files = ModelFiles(tokenizer_json=tokenizer.to_str().encode())
        opened = open_vocabulary(files, tokenizer.get_vocab_size(), (end,))
        assert opened is not None
        self._vocabulary = opened
        self._mask = np.zeros((1, -(-opened.size // 32)), dtype=np.int32)

    def compile(self, schema: dict[str, Any]) -> Any:
        from llguidance import LLMatcher

        from grammars.guide import Guide, GuideKind
        from grammars.source import PARSER_LIMITS, grammar_source

        source = grammar_source(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))
        made = LLMatcher(self._vocabulary.tokenizer, source, limits=PARSER_LIMITS, log_level=0)
        assert not made.is_error(), made.get_error()
        return made

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(matcher, self._mask)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))


class XGrammar:
    """The other library."""

    name = "xgrammar"

    def __init__(self, tokenizer: tokenizers.Tokenizer, end: int) -> None:
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(
            wrapped, vocab_size=tokenizer.get_vocab_size(), stop_token_ids=[end]
        )
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def compile(self, schema: dict[str, Any]) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema))

    def start(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._mask)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    libraries: list[Callable[..., Any]] = [LlGuidance, *([XGrammar] if find_spec("xgrammar") else [])]
    print(
        "| vocabulary | schema | library | compile ms | mask us, median | p99 | largest |\n"
        "|---|---|---|---|---|---|---|"
    )
    for title, tokenizer, end in (
        ("demo, 768", tokenizers.Tokenizer.from_file(str(DEMO)), 2),
        ("made up, 128000", large_tokenizer(), -1),
    ):
        for library in libraries:
            opened = library(tokenizer, end if end >= 0 else tokenizer.token_to_id("<|end|>"))
            for name, (schema, document) in CASES.items():
                ids = tokenizer.encode(json.dumps(document), add_special_tokens=False).ids
                print(f"| {title} | {name} | {opened.name} | {_measured(opened, schema, ids, rounds)} |", flush=True)


def _measured(library: Any, schema: dict[str, Any], ids: list[int], rounds: int) -> str:
    compiles, masks = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        compiled = library.compile(schema)
        compiles.append(time.perf_counter() - began)
        matcher = library.start(compiled)
        for token in ids:
            began = time.perf_counter()
            library.mask(matcher)
            masks.append(time.perf_counter() - began)
            assert library.accept(matcher, token), token
    masks.sort()
    cells = (1e6 * statistics.median(masks), 1e6 * masks[int(0.99 * len(masks))], 1e6 * masks[-1])
    return " | ".join([f"{1e3 * statistics.median(compiles):.1f}", *(f"{cell:.0f}" for cell in cells)])


if __name__ == "__main__":
    main()
