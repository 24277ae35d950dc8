"""A model's tokenizer, from the files in its workers' model card."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from baton.errors import Unsupported
from router.text.chat_template import LONGEST_SECONDS, ChatTemplate, Turn
from router.text.detokenizer import ByteTokens, Detokenizer, WholeCharacters
from router.text.encoding.encoder import Encoder
from router.text.parsing.formats import ToolFormat
from router.text.parsing.parts import BEGIN, END
from router.text.parsing.registry import format_of
from router.text.token_messages import TokenTexts

_REASONING_TOKENS = 16  # of a prompt's end that may spell <think> and white space


class Tokenizer:
    """A model's tokenizer and chat template. Safe to use from several threads.

    Raises ValueError if the files cannot be read. `chat_template` takes precedence over the one in the configuration.
    `placeholder` stands for an image if the template does not write one.
    """

    def __init__(self, tokenizer_json: bytes, config_json: str, chat_template: str, placeholder: str = "") -> None:
        self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._encoder = Encoder(self._tokenizer)
        config = json.loads(config_json or "{}")
        source = chat_template or _embedded_template(config)
        self._template = ChatTemplate(source, _special_tokens(config), placeholder) if source else None
        self._tool_format = format_of(source) if self._template and self._template.takes_tools else None
        self._has_reasoning = END in source or self._tokenizer.token_to_id(END) is not None
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._byte_tokens = _byte_tokens(self._tokenizer)
        joins = _joins_bytes(self._tokenizer)
        self._texts = TokenTexts(self._decode_all, self._special_ids) if joins else None
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def can_chat(self) -> bool:
        """True if there is a chat template."""
        return self._template is not None

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls; None if its template takes no tools, or the format is not known."""
        return self._tool_format

    @property
    def has_reasoning(self) -> bool:
        """True if answers may begin with reasoning."""
        return self._has_reasoning

    def ends_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """True if a rendered prompt ends with the beginning of reasoning."""
        tail = prompt[-_REASONING_TOKENS:]
        return self._has_reasoning and self.decode(tail, keep_special_tokens=True).rstrip().endswith(BEGIN)

    def encode(self, text: str, salt: str = "") -> list[int]:
        """The ids of a plain prompt, with the special tokens at its start. `salt` is that of the KV cache."""
        return self._encoder.encode(text, add_special_tokens=True, salt=salt)

    def encode_chat(self, text: str, salt: str = "") -> list[int]:
        """The ids of a rendered conversation, which contains its special tokens. `salt` is that of the KV cache."""
        return self._encoder.encode(text, add_special_tokens=False, salt=salt)

    def encode_words(self, words: Sequence[str]) -> list[list[tuple[int, ...]]]:
        """The ids of each word, without special tokens around it: as it is, and after a space; each way once."""
        texts = [text for word in words for text in (word, f" {word}")]
        ids = [*map(tuple, self._encoder.encode_all(texts))]
        return [[*dict.fromkeys(pair)] for pair in zip(ids[::2], ids[1::2], strict=True)]

    def render(
        self,
        turns: Sequence[Turn],
        variables: Mapping[str, Any],
        seconds: float = LONGEST_SECONDS,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as one text. Raises Unsupported without a template, else as `ChatTemplate.render`."""
        if self._template is None:
            raise Unsupported("the model has no chat template; it takes prompt and token_ids")
        return self._template.render(turns, variables, seconds, tools)

    def decode(self, ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        """The text of complete ids."""
        if self._byte_tokens is None:
            return str(self._tokenizer.decode_batch([ids], skip_special_tokens=not keep_special_tokens)[0])
        characters = WholeCharacters(self._byte_tokens)
        shown = ids if keep_special_tokens else [one for one in ids if one not in self._special_ids]
        return self._decode_all([*characters.push(shown), *characters.flush()])

    def detokenizer(self, keep_special_tokens: bool, kept: Sequence[str] = ()) -> Detokenizer:
        """A detokenizer for one completion. The text has the special tokens `kept`, or all of them."""
        kept_ids = {self._tokenizer.token_to_id(token) for token in kept}
        skipped = frozenset() if keep_special_tokens else self._special_ids - kept_ids
        return Detokenizer(self._decode_all, skipped, self._byte_tokens, self._texts)

    def is_special(self, token_id: int) -> bool:
        """True if the token is special, such as the end of a sequence."""
        return token_id in self._special_ids

    def _decode_all(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _byte_tokens(tokenizer: tokenizers.Tokenizer) -> ByteTokens | None:
    """The byte tokens of a vocabulary with byte fallback, such as those of Llama 2, Mistral and Gemma."""
    if tokenizer.decoder is None or b'"ByteFallback"' not in tokenizer.decoder.__getstate__():
        return None
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    return None if None in ids else ByteTokens([one for one in ids if one is not None])


def _joins_bytes(tokenizer: tokenizers.Tokenizer) -> bool:
    """True if a text is its tokens' bytes, one after the other, as with GPT-2, Llama 3 and Qwen."""
    decoder = tokenizer.decoder
    return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"


def _embedded_template(config: Mapping[str, Any]) -> str:
    """The template in tokenizer_config.json; of several, the one named `default`."""
    template = config.get("chat_template") or ""
    if isinstance(template, str):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    return str(named.get("default", ""))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens such as bos_token, each a text or an object with a `content`."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
        elif name.endswith("_token") and isinstance(value, dict) and isinstance(value.get("content"), str):
            tokens[name] = value["content"]
    return tokens
