"""The model's tokens as grammars see them: bytes, special tokens, and the ends of an answer."""

import structlog
from llguidance import LLTokenizer

from services.engines.base import ModelFiles

_log = structlog.get_logger(__name__)


class GrammarVocabulary:
    """The tokens of a model. Safe to use from several threads."""

    def __init__(self, tokenizer: LLTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.size: int = tokenizer.vocab_size

    def special_id(self, text: str) -> int | None:
        """Returns the id of a text that is one special token; None for other texts."""
        ids = self.tokenizer.tokenize_str(text, parse_special=True)
        return ids[0] if len(ids) == 1 and self.tokenizer.is_special_token(ids[0]) else None


def open_vocabulary(files: ModelFiles, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary | None:
    """Returns the vocabulary; None, with the reason in the log, if it cannot be used in guided decoding.

    `vocab_size` is the width of the logits, which may exceed the number of tokens. An answer ends with a token of
    `eos_token_ids`, so that a model without any has no guided decoding.
    """
    try:
        if not files.tokenizer_json or not eos_token_ids:
            raise ValueError("the model has no tokenizer.json, or no end-of-sequence token")
        tokenizer = LLTokenizer(files.tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as error:
        _log.info("no guided decoding with this model", reason=str(error))
        return None
    return GrammarVocabulary(tokenizer, eos_token_ids)
