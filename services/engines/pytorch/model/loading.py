"""Loads a checkpoint: the module that computes logits, and the model's facts.

transformers is imported when it is needed: a worker that finds its weights in memory does without (kept_weights.py).
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from safetensors import SafetensorError

from baton.errors import ConfigError
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.fused_model import FusedWeights
from services.engines.pytorch.model.support import TextShape, text_shape
from services.engines.pytorch.parallel.shards import WHOLE, Shard, keep_part, shape_of_part
from services.engines.rules import ImageRules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, ready to be called: `module` by transformers, unless the `fused` weights are all of it.

    `kept_bytes` of a GPU are those of weights in memory that PyTorch has not allocated.
    """

    module: torch.nn.Module
    shape: TextShape
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    images: ImageRules | None
    shard: Shard = WHOLE
    fused: FusedWeights | None = None
    kept_bytes: int = 0


def load_model(config: PyTorchConfig, shard: Shard = WHOLE) -> LoadedModel:
    """Loads the checkpoint, or a rank's part of it, from its folder; `shape` is then the part's.

    Raises ConfigError if it does not exist or is not supported.
    """
    from services.engines.pytorch.model import attention
    from services.engines.pytorch.vision.images import image_rules

    model_config = read_config(config.model)
    shape = text_shape(model_config, config.max_context_tokens)
    device = choose_device(config)
    use_device(device)
    dtype = choose_dtype(config, device, model_config)
    images = image_rules(model_config, config.model, name_of(dtype))
    attention.register()
    module = _read_weights(config.model, model_config, dtype)
    if shard.size > 1:
        keep_part(module, shard)
        shape = shape_of_part(shape, shard)
    _log.info("language model loaded", parameters=count_parameters(module), device=str(device))
    placed = torch.nn.Module.to(module.requires_grad_(False).train(False), device)
    return LoadedModel(placed, shape, device, dtype, eos_token_ids(config.model, model_config), images, shard)


def _read_weights(folder: Path, model_config: "PreTrainedConfig", dtype: torch.dtype) -> "PreTrainedModel":
    """Loads the model with all its weights; for LLaVA the language model only."""
    from services.engines.pytorch.model import attention

    kind = kind_of(model_config)
    quiet()
    try:
        loaded: Any = kind.from_pretrained(
            folder, local_files_only=True, attn_implementation=attention.NAME, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"engine.model: the weights in {folder} cannot be read: {error}") from error
    module, report = loaded
    # The library fills missing weights with random numbers.
    if report["missing_keys"]:
        raise ConfigError(f"engine.model: {folder} lacks weights: {', '.join(sorted(report['missing_keys'])[:5])}")
    found: PreTrainedModel = module
    return found


def kind_of(model_config: "PreTrainedConfig") -> Any:
    """Returns the class of the model: for LLaVA that of the language model only."""
    from transformers import AutoModelForCausalLM, LlavaConfig

    from services.engines.pytorch.vision.llava import LlavaLanguage

    return LlavaLanguage if isinstance(model_config, LlavaConfig) else AutoModelForCausalLM


def read_config(folder: Path) -> "PreTrainedConfig":
    """Returns the checkpoint's configuration. Raises ConfigError if it cannot be read."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"engine.model: {folder} is not a checkpoint folder: it has no config.json")
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ConfigError(f"engine.model: {folder / 'config.json'} cannot be read: {error}") from error
    return found


def choose_device(config: PyTorchConfig) -> torch.device:
    """Returns the configured device. See device_named."""
    return device_named(config.device)


def device_named(name: str) -> torch.device:
    """Returns the device. Raises ConfigError if CUDA is configured and not available, or has no GPU of that index."""
    has_cuda = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError(f"engine.device: {name} was asked for and PyTorch finds none")
    _, _, index = name.partition(":")
    if not index:
        return torch.device("cuda", torch.cuda.current_device())
    if int(index) >= torch.cuda.device_count():
        raise ConfigError(f"engine.device: {name}: this process sees {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", int(index))


def use_device(device: torch.device) -> None:
    """Makes a GPU the calling thread's: kernels, pinned memory and graphs of the thread belong to it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_dtype(config: PyTorchConfig, device: torch.device, model_config: "PreTrainedConfig") -> torch.dtype:
    """Returns the dtype, as configured or derived."""
    if config.dtype == "float32" or (config.dtype == "auto" and device.type == "cpu"):
        return torch.float32
    stored = getattr(model_config, "dtype", None) or getattr(model_config.get_text_config(), "dtype", None)
    whole = config.dtype == "auto" and stored in (torch.float32, "float32")
    return torch.float32 if whole else torch.bfloat16


def eos_token_ids(folder: Path, config: "PreTrainedConfig") -> tuple[int, ...]:
    """Returns every id that ends an answer, from the generation settings and the model's configuration."""
    from transformers import GenerationConfig

    sources: list[object] = [config, config.get_text_config()]
    if (folder / "generation_config.json").is_file():
        sources.insert(0, GenerationConfig.from_pretrained(folder, local_files_only=True))
    found: list[int] = []
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in found))


def name_of(dtype: torch.dtype) -> str:
    """Returns the dtype's name, such as float32."""
    return str(dtype).removeprefix("torch.")


def count_parameters(module: torch.nn.Module) -> int:
    """Returns the number of parameters."""
    return sum(weight.numel() for weight in module.parameters())


def quiet() -> None:
    """Turns off progress bars and load reports, which do not belong in a worker's log."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity(logging.ERROR)
