"""Text to ids and back, from the tokenizer files that a worker hands out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from router.detokenizer import Detokenizer
from router.template import ChatTemplate, Turn
from rpc.errors import Unsupported


class Tokenizer:
    """A model's tokenizer and chat template. Safe to use from several threads.

    Raises ValueError if the files cannot be read. `chat_template` wins over the one inside the configuration.
    `placeholder` is what stands for an image where the template cannot write it.
    """

    def __init__(self, tokenizer_json: bytes, config_json: str, chat_template: str, placeholder: str = "") -> None:
        self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = json.loads(config_json or "{}")
        source = chat_template or _embedded_template(config)
        self._template = ChatTemplate(source, _special_tokens(config), placeholder) if source else None
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, with the special tokens that the model begins with."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, text: str) -> list[int]:
        """The ids of a rendered conversation, which has its special tokens already."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, turns: Sequence[Turn], variables: Mapping[str, Any]) -> str:
        """The conversation as one text. Raises InvalidRequest where the template refuses it."""
        if self._template is None:
            raise Unsupported("the model has no chat template; it takes prompt and token_ids")
        return self._template.render(turns, variables)

    def decode(self, ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        """The text of ids, all at once."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=not keep_special_tokens))

    def detokenizer(self, keep_special_tokens: bool) -> Detokenizer:
        """A fresh one for one answer."""
        return Detokenizer(self._decode_all, frozenset() if keep_special_tokens else self._special_ids)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is one that stands for no text, such as the end of a sequence."""
        return token_id in self._special_ids

    def _decode_all(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _embedded_template(config: Mapping[str, Any]) -> str:
    """The template of tokenizer_config.json: one, or several with names, of which `default` is meant."""
    template = config.get("chat_template") or ""
    if isinstance(template, str):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    return str(named.get("default", ""))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens such as bos_token, which are written as a text or as an object with a `content`."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
        elif name.endswith("_token") and isinstance(value, dict) and isinstance(value.get("content"), str):
            tokens[name] = value["content"]
    return tokens
