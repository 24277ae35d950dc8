"""A checkpoint as a model that gives a state for each token, by transformers itself: decoders, and models like BERT.

From the states of a text's tokens to one vector. The modes are those of sentence-transformers.

The rules for vectors in a checkpoint's sentence-transformers files: `modules.json`, and those that it names.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import structlog
import torch
from safetensors import SafetensorError
from transformers import AutoModel, LlavaConfig, PreTrainedConfig, PreTrainedModel

from baton.errors import ConfigError
from services.engines.base import Vector
from services.engines.pytorch.config import PyTorchConfig
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
from services.engines.rules import EmbeddingRules

# The keys of a Pooling module's configuration, each true or false, in the order in which vectors are joined.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
# Newer files have one key, `pooling_mode`, with these values.
_NAMES = {"weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class VectorRules:
    """`pooling` is empty, and the others None, where the files say nothing."""

    pooling: tuple[str, ...] = ()
    normalize: bool | None = None
    max_input_tokens: int | None = None


def read_rules(folder: Path) -> VectorRules:
    """Reads the files. Raises ConfigError for those that cannot be read, and for modules that are not supported."""
    longest = _read(folder / "sentence_bert_config.json").get("max_seq_length")
    modules = _modules(folder)
    pooling = next((one["path"] for one in modules if _kind(one) == "Pooling"), "1_Pooling")
    return VectorRules(
        pooling=_pooling(folder / pooling / "config.json"),
        normalize=any(_kind(one) == "Normalize" for one in modules) if modules else None,
        max_input_tokens=int(longest) if longest else None,
    )


def _modules(folder: Path) -> list[Mapping[str, str]]:
    modules: list[Mapping[str, str]] = _json(folder / "modules.json") or []
    for one in modules:
        if _kind(one) not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(f"engine.model: {folder / 'modules.json'}: modules {_kind(one)} are not supported")
        if _kind(one) == "Transformer" and one["path"]:
            raise ConfigError(f"engine.model: {folder / 'modules.json'}: name the folder {one['path']} as the model")
    return modules


def _kind(module: Mapping[str, str]) -> str:
    return module["type"].rpartition(".")[2]


def _pooling(path: Path) -> tuple[str, ...]:
    settings = _read(path)
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named or []
    found = tuple(_NAMES.get(mode, mode) for mode in modes)
    found += tuple(mode for key, mode in _MODES.items() if settings.get(key))
    if unknown := set(found) - set(_MODES.values()):
        raise ConfigError(f"engine.model: {path}: pooling {', '.join(sorted(unknown))} is not supported")
    return found


def _read(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _json(path) or {}
    return found


def _json(path: Path) -> Any:
    """The content of a file; None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.model: {path} cannot be read: {error}") from error


# (states [texts, tokens, hidden], mask [texts, tokens] of 1 and 0) to vectors [texts, hidden]; padding is on the right.
Pooling: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def pool(states: torch.Tensor, mask: torch.Tensor, modes: Sequence[str]) -> torch.Tensor:
    """Returns the vectors in float32; those of several modes are joined, in their order."""
    states = states.float()
    return torch.cat([POOLINGS[mode](states, mask) for mode in modes], dim=-1)


def _last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]


def _cls(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    del mask
    return states[:, 0]


def _max(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)


def _sum(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # Padding may be NaN, which a weight of 0 would not remove.
    return states.masked_fill(weights.unsqueeze(-1) == 0, 0.0).mul(weights.unsqueeze(-1)).sum(1)


def _mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _sum(states, mask.float()) / mask.sum(1, keepdim=True)


def _mean_sqrt_len(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _sum(states, mask.float()) / mask.sum(1, keepdim=True).sqrt()


def _weighted_mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask.float()
    return _sum(states, weights) / weights.sum(1, keepdim=True)


POOLINGS: dict[str, Pooling] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len": _mean_sqrt_len,
    "weighted_mean": _weighted_mean,
    "last": _last,
}
"""In the order in which sentence-transformers joins them."""


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
