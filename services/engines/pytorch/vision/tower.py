"""A checkpoint's vision encoder: image processor, vision tower and projector, and their fingerprint."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
import transformers
from PIL import Image
from safetensors import SafetensorError
from transformers import AutoImageProcessor, LlavaConfig, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor

from baton.errors import ConfigError
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.loading import (
    choose_device,
    choose_dtype,
    count_parameters,
    name_of,
    quiet,
    read_config,
    use_device,
)
from services.engines.pytorch.vision.images import image_rules, require_images
from services.engines.pytorch.vision.llava import LlavaVision
from services.engines.rules import ImageRules

_log = structlog.get_logger(__name__)

_CONTRACT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision encoder on its device."""

    module: PreTrainedModel
    processor: BaseImageProcessor
    rules: ImageRules
    device: torch.device
    dtype: torch.dtype

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights in use, and of the processor and its version."""
        return self.rules.encoder_fingerprint

    def prepare(self, image: Image.Image) -> torch.Tensor:
        """Returns pixels for the tower, `[1, channels, height, width]`."""
        prepared: torch.Tensor = self.processor(images=[image], return_tensors="pt")["pixel_values"]
        return prepared

    def look(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the embeddings of prepared images, `[tokens, hidden size]` each, in host memory."""
        batch = torch.cat(list(pixels)).to(self.device, self.dtype)
        module: Any = self.module
        return [rows.cpu() for rows in module.get_image_features(pixel_values=batch, return_dict=True).pooler_output]


def load_vision(config: PyTorchConfig) -> Vision:
    """Loads the vision encoder, and nothing else, from the checkpoint. Raises ConfigError if it is not supported."""
    model_config = require_images(read_config(config.model))
    device = choose_device(config)
    use_device(device)
    dtype = choose_dtype(config, device, model_config)
    rules = image_rules(model_config, config.model, name_of(dtype))
    assert rules is not None
    module = _read_weights(config, model_config, dtype)
    processor = _read_processor(config)
    fingerprint = _fingerprint(module, processor)
    _log.info("vision loaded", parameters=count_parameters(module), device=str(device), fingerprint=fingerprint)
    on_device = torch.nn.Module.to(module.requires_grad_(False).train(False), device)
    vision = Vision(on_device, processor, replace(rules, encoder_fingerprint=fingerprint), device, dtype)
    _warm_up(vision)
    return vision


def _read_weights(config: PyTorchConfig, model_config: LlavaConfig, dtype: torch.dtype) -> PreTrainedModel:
    quiet()
    try:
        loaded: Any = LlavaVision.from_pretrained(
            config.model, config=model_config, local_files_only=True, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"engine.model: the weights in {config.model} cannot be read: {error}") from error
    module, report = loaded
    if report["missing_keys"]:
        raise ConfigError(f"engine.model: {config.model} lacks {', '.join(sorted(report['missing_keys'])[:5])}")
    found: PreTrainedModel = module
    return found


def _read_processor(config: PyTorchConfig) -> BaseImageProcessor:
    """Returns the processor that uses Pillow: the other variant needs torchvision, and its pixels differ a little."""
    try:
        found: BaseImageProcessor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            config.model, local_files_only=True, backend="pil"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.model: {config.model} has no image processor that works: {error}") from error
    return found


def _fingerprint(module: PreTrainedModel, processor: BaseImageProcessor) -> str:
    digest = hashlib.sha256(f"{_CONTRACT_VERSION}:{transformers.__version__}".encode())
    digest.update(json.dumps(processor.to_dict(), sort_keys=True, default=str).encode())
    for name, weight in sorted(module.state_dict().items()):
        digest.update(f"{name}:{weight.dtype}:{tuple(weight.shape)}".encode())
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _warm_up(vision: Vision) -> None:
    """Encodes a grey image, to check that it has as many tokens as configured."""
    [rows] = vision.look([vision.prepare(Image.new("RGB", (64, 64), (128, 128, 128)))])
    expected = (vision.rules.tokens_per_image, vision.rules.hidden_size)
    if tuple(rows.shape) != expected:
        raise ConfigError(f"engine.model: an image becomes {tuple(rows.shape)} numbers; {expected} were expected")
