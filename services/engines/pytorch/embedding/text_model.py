"""A checkpoint as a model that gives a state for each token, by transformers itself: decoders, and models like BERT."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError
from transformers import AutoModel, LlavaConfig, PreTrainedConfig, PreTrainedModel

from baton.errors import ConfigError
from services.engines.base import EmbeddingRules
from services.engines.embedding import Vector
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.embedding.checkpoint_rules import VectorRules, read_rules
from services.engines.pytorch.embedding.pooling import pool
from services.engines.pytorch.model.loading import (
    choose_device,
    choose_dtype,
    count_parameters,
    quiet,
    read_config,
    use_device,
)
from services.engines.pytorch.model.support import FAMILIES
from services.engines.pytorch.vision.llava import LlavaLanguage

_log = structlog.get_logger(__name__)

# Their first position is the one after the id of padding.
_OFFSET_POSITIONS = ("camembert", "data2vec-text", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl")


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model on its device."""

    module: PreTrainedModel
    rules: EmbeddingRules
    device: torch.device
    dtype: torch.dtype
    padding_id: int
    config: PreTrainedConfig

    @property
    def generates(self) -> bool:
        """True if the checkpoint has a language model's head, too."""
        return _generates(self.config)

    def vectors(self, texts: Sequence[Sequence[int]]) -> list[Vector]:
        """Runs texts together, padded on the right. Returns float32 vectors, not normalized."""
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[self.padding_id] * (longest - len(text))] for text in texts], device=self.device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=self.device)
        states = self.module(input_ids=ids, attention_mask=mask).last_hidden_state
        return list(pool(states, mask, self.rules.pooling.split("+")).cpu().numpy())


def load_text_model(config: PyTorchConfig) -> TextModel:
    """Loads a checkpoint from its folder. Raises ConfigError if it does not exist or is not supported."""
    model_config = read_config(config.model)
    if getattr(model_config, "is_encoder_decoder", False):
        raise ConfigError(f"engine.model: models of type {model_config.model_type!r} make no embeddings here")
    rules = _rules(config, model_config, read_rules(config.model))
    device = choose_device(config)
    use_device(device)
    dtype = choose_dtype(config, device, model_config)
    module = _read_weights(config.model, model_config, dtype)
    _log.info("embedding model loaded", parameters=count_parameters(module), pooling=rules.pooling, device=str(device))
    module = torch.nn.Module.to(module.requires_grad_(False).train(False), device)
    padding = getattr(model_config.get_text_config(), "pad_token_id", None)
    return TextModel(module, rules, device, dtype, int(padding or 0), model_config)


def _rules(config: PyTorchConfig, model_config: PreTrainedConfig, stored: VectorRules) -> EmbeddingRules:
    modes = stored.pooling or (("last",) if is_decoder(model_config) else ("mean",))
    if config.pooling != "auto":
        modes = (config.pooling,)
    text = model_config.get_text_config()
    limits = [_positions(text), stored.max_input_tokens, config.max_context_tokens]
    return EmbeddingRules(
        dimensions=int(text.hidden_size) * len(modes),
        max_input_tokens=min(limit for limit in limits if limit is not None),
        pooling="+".join(modes),
        normalize=True if stored.normalize is None else stored.normalize,
    )


def is_decoder(config: PreTrainedConfig) -> bool:
    """True if a checkpoint is of a generating model: by its type, or by the class that it was saved from."""
    return _generates(config) or config.model_type in FAMILIES


def _generates(config: PreTrainedConfig) -> bool:
    kind = next(iter(getattr(config, "architectures", None) or ()), "")
    return str(kind).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))


def _positions(text: PreTrainedConfig) -> int:
    most = int(text.max_position_embeddings)
    return most - int(text.pad_token_id) - 1 if text.model_type in _OFFSET_POSITIONS else most


def _read_weights(folder: Path, model_config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Loads the model without its head; of LLaVA the language model only."""
    kind: Any = LlavaLanguage if isinstance(model_config, LlavaConfig) else AutoModel
    quiet()
    try:
        module, report = kind.from_pretrained(
            folder, local_files_only=True, attn_implementation="sdpa", dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"engine.model: the weights in {folder} cannot be read: {error}") from error
    # The library fills missing weights with random numbers. A pooler's are not used here.
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith("pooler.")):
        raise ConfigError(f"engine.model: {folder} lacks weights: {', '.join(missing[:5])}")
    found: PreTrainedModel = module.model.language_model if kind is LlavaLanguage else module
    return found
