"""The model's tokens as grammars see them: bytes, special tokens, and the ends of an answer."""

import json
from collections.abc import Mapping

import structlog
from llguidance import LLTokenizer

from grammars.source import special_token_ids
from runtime.entropy import token_hex
from services.engines.base import ModelFiles

_log = structlog.get_logger(__name__)


class GrammarVocabulary:
    """The tokens of a model. Safe to use from several threads.

    No text is a special token to `tokenizer`, so that an answer that must spell one is spelt with ordinary tokens.
    """

    def __init__(self, tokenizer: LLTokenizer, eos_token_ids: tuple[int, ...], special_ids: Mapping[str, int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.size: int = tokenizer.vocab_size
        self._special_ids = special_ids

    def special_id(self, text: str) -> int | None:
        """Returns the id of a text that is one special token; None for other texts."""
        return self._special_ids.get(text)


def open_vocabulary(files: ModelFiles, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary | None:
    """Returns the vocabulary; None, with the reason in the log, if it cannot be used in guided decoding.

    `vocab_size` is the width of the logits, which may exceed the number of tokens. An answer ends with a token of
    `eos_token_ids`, so that a model without any has no guided decoding.
    """
    try:
        if not files.tokenizer_json or not eos_token_ids:
            raise ValueError("the model has no tokenizer.json, or no end-of-sequence token")
        special_ids = special_token_ids(files.tokenizer_json)
        text = _with_hidden_names(files.tokenizer_json, special_ids)
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as error:
        _log.info("no guided decoding with this model", reason=str(error))
        return None
    return GrammarVocabulary(tokenizer, eos_token_ids, special_ids)


def _with_hidden_names(tokenizer_json: bytes, special_ids: Mapping[str, int]) -> str:
    """Returns the tokenizer with names for its special tokens that no client can write.

    llguidance tokenizes text that a grammar forces, and would make a special token of its name, which its grammar then
    refuses.
    """
    tokenizer = json.loads(tokenizer_json)
    secret = token_hex(16)
    hidden = {name: f"<{secret}-{token_id}>" for name, token_id in special_ids.items()}
    for token in tokenizer["added_tokens"]:
        token["content"] = hidden.get(token["content"], token["content"])
    model = tokenizer["model"]
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, dict):
        model["vocab"] = {hidden.get(name, name): token_id for name, token_id in vocabulary.items()}
    else:  # of a Unigram model: pieces with their scores
        model["vocab"] = [[hidden.get(name, name), score] for name, score in vocabulary]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    return json.dumps(tokenizer)
