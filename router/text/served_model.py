"""A model as the router serves it: tokenizer, limits and capabilities, from a worker's model card."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.engine.v1 import worker_pb2
from baton.errors import Unsupported
from baton.inference.v1 import generate_pb2, model_pb2
from router.text.parsing.parts import ReasoningParser
from router.text.parsing.registry import AnswerParser
from router.text.tokenizer import Tokenizer
from rpc.violations import Violations


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests are checked and tokenized against. Without a tokenizer, it takes and returns ids only."""

    name: str
    limits: model_pb2.ModelLimits
    capabilities: model_pb2.ModelCapabilities
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    images: worker_pb2.ImageRules | None = None
    embedding: model_pb2.EmbeddingRules | None = None  # of a worker with the role embed
    drawing: model_pb2.ImageGeneration | None = None  # of a worker with the role diffuse
    block_tokens: int = 0  # of the blocks that prefix caches are made of; 0 if unknown
    block_bytes: int = 0
    dtype: str = ""
    engine_settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_card(cls, card: worker_pb2.ModelCard) -> "ServedModel":
        """Reads a card. Slow for large tokenizers: call it in a thread. Raises ValueError for unreadable files."""
        tokenizer = _tokenizer(card)
        return cls(
            name=card.name,
            limits=card.limits,
            capabilities=_capabilities(card, tokenizer),
            eos_token_ids=frozenset(card.eos_token_ids),
            tokenizer=tokenizer,
            images=card.images if card.HasField("images") else None,
            embedding=_embedding(card),
            drawing=card.image_generation if card.HasField("image_generation") else None,
            block_tokens=card.layout.block_tokens,
            block_bytes=card.layout.block_bytes,
            dtype=card.layout.dtype,
            engine_settings=dict(card.engine_settings),
        )

    @property
    def abilities(self) -> str:
        """The model's capabilities, for error messages."""
        return ", ".join(self._inputs_and_options)

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises Unsupported if the model takes no text."""
        if self.tokenizer is None:
            raise self.unsupported("text")
        return self.tokenizer

    def unsupported(self, what: str) -> Unsupported:
        """The error for something that the model lacks."""
        return Unsupported(f"{self.name} does not support {what}; it supports {self.abilities}")

    def check_length(self, field: str, length: int, violations: Violations) -> None:
        """Notes a text of so many characters that the model's context never holds it."""
        most = self.most_characters
        if length > most:
            violations.add(field, f"has {length} characters; the context of the model never holds more than {most}")

    @property
    def most_characters(self) -> float:
        """The most characters that a context can hold."""
        return math.inf if self.tokenizer is None else self.limits.max_context_tokens * self.tokenizer.longest_token

    @property
    def features(self) -> Sequence[str]:
        """The features that requests may use, in words."""
        capabilities = self.capabilities
        more = {
            "several answers": capabilities.multiple_answers and not capabilities.embeddings_only,
            "reasoning": capabilities.reasoning,
            "embeddings": self.embedding is not None and not capabilities.embeddings_only,
        }
        return [*self._inputs_and_options, *(name for name, is_able in more.items() if is_able)]

    @property
    def _inputs_and_options(self) -> Sequence[str]:
        capabilities = self.capabilities
        if self.capabilities.embeddings_only:
            return ["embeddings"]
        if self.capabilities.images_only:
            return ["pictures"]
        text = self.tokenizer is not None
        able = {
            "prompt": text,
            "token_ids": True,
            "chat": self.can_chat,
            "stop strings": text,
            "logprobs": capabilities.logprobs,
            "prompt logprobs": capabilities.prompt_logprobs,
            "guided decoding": capabilities.guided_decoding,
            "lora": capabilities.lora,
            "tools": capabilities.tools,
            "media": bool(capabilities.modalities),
        }
        return [name for name, is_able in able.items() if is_able]

    def answer_parser(
        self, request: generate_pb2.GenerateRequest, prompt: Sequence[int], call_id: str
    ) -> AnswerParser | None:
        """The parser of reasoning and tool calls for an answer to this chat; None for plain text.

        The ids of its calls follow from `call_id`.
        """
        if self.tokenizer is None or not request.HasField("chat") or request.response.raw_text:
            return None
        tools = self.tokenizer.tool_format if request.chat.tools else None
        reasoning = None
        if self.tokenizer.has_reasoning and not _is_wholly_guided(request):
            reasoning = ReasoningParser(is_open=self.tokenizer.ends_in_reasoning(prompt))
        if tools is None and reasoning is None:
            return None
        names = {tool.name for tool in request.chat.tools}
        response = request.response
        return AnswerParser(
            reasoning,
            tools,
            names,
            call_id=call_id,
            is_single=request.chat.tool_choice.is_single,
            grows=response.stream_tool_calls and not response.HasField("keep"),
        )

    @property
    def can_chat(self) -> bool:
        """True if conversations can be rendered."""
        return self.tokenizer is not None and self.tokenizer.can_chat


def _embedding(card: worker_pb2.ModelCard) -> model_pb2.EmbeddingRules | None:
    if not card.HasField("embedding"):
        return None
    if not card.embedding.dimensions or not card.embedding.max_input_tokens:
        raise ValueError("embedding: has no dimensions, or takes no tokens")
    return card.embedding


def _capabilities(card: worker_pb2.ModelCard, tokenizer: Tokenizer | None) -> model_pb2.ModelCapabilities:
    """The capabilities of the workers, with those that the router adds."""
    capabilities = model_pb2.ModelCapabilities()
    capabilities.CopyFrom(card.capabilities)
    capabilities.multiple_answers = not capabilities.images_only
    if tokenizer is not None and tokenizer.can_chat:
        capabilities.tools = tokenizer.tool_format is not None
        capabilities.reasoning = tokenizer.has_reasoning
    return capabilities


def _is_wholly_guided(request: generate_pb2.GenerateRequest) -> bool:
    """True if the answer is in a grammar from its first token: it then has no reasoning, even after `<think>`."""
    guided = request.guided
    has_free_text = guided.HasField("structural_tags") and not guided.structural_tags.is_required
    return request.HasField("guided") and not has_free_text


def _tokenizer(card: worker_pb2.ModelCard) -> Tokenizer | None:
    if not card.tokenizer_json:
        return None
    return Tokenizer(card.tokenizer_json, card.tokenizer_config_json, card.chat_template, card.images.placeholder)
