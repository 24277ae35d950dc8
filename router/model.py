"""A model as the router serves it: its tokenizer and limits, made from the card that a worker hands out."""

from dataclasses import dataclass

from baton.engine.v1 import worker_pb2
from baton.inference.v1 import model_pb2

from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked and tokenized against. Without a tokenizer only token ids go in and out."""

    name: str
    limits: model_pb2.ModelLimits
    capabilities: model_pb2.ModelCapabilities
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    images: worker_pb2.ImageRules | None = None

    @classmethod
    def from_card(cls, card: worker_pb2.ModelCard) -> "ServedModel":
        """Reads a card. Slow for a large tokenizer: call it in a thread. Raises ValueError for unreadable files."""
        return cls(
            name=card.name,
            limits=card.limits,
            capabilities=card.capabilities,
            eos_token_ids=frozenset(card.eos_token_ids),
            tokenizer=_tokenizer(card),
            images=card.images if card.HasField("images") else None,
        )

    @property
    def abilities(self) -> str:
        """What the model can do, in words, for messages about what it cannot."""
        capabilities = self.capabilities
        text = self.tokenizer is not None
        able = {
            "prompt": text,
            "token_ids": True,
            "chat": self.can_chat,
            "stop strings": text,
            "logprobs": capabilities.logprobs,
            "guided decoding": capabilities.guided_decoding,
            "lora": capabilities.lora,
            "n > 1": capabilities.multiple_answers,
            "media": bool(capabilities.modalities),
        }
        return ", ".join(name for name, is_able in able.items() if is_able)

    @property
    def can_chat(self) -> bool:
        """Whether conversations can be rendered."""
        return self.tokenizer is not None and self.tokenizer.can_chat


def _tokenizer(card: worker_pb2.ModelCard) -> Tokenizer | None:
    if not card.tokenizer_json:
        return None
    return Tokenizer(card.tokenizer_json, card.tokenizer_config_json, card.chat_template, card.images.placeholder)
