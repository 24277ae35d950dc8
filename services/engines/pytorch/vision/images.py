"""Images in a checkpoint's configuration: which models take them, and how many tokens an image has."""

import json
from pathlib import Path
from typing import Any

from transformers import LlavaConfig, PreTrainedConfig

from baton.errors import ConfigError
from services.engines.kv import embedding_layout
from services.engines.pytorch.model import checkpoint
from services.engines.rules import ImageRules

FAMILIES = ("llava",)
"""Model types that the tests compare with transformers' own `generate` on images."""

TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision towers, and how many tokens of the class of an image each puts before those of its patches."""


def image_rules(config: PreTrainedConfig, folder: Path, dtype: str) -> ImageRules | None:
    """Returns the model's rules for images; None for a model without. Raises ConfigError for unsupported
    vision towers.
    """
    if not isinstance(config, LlavaConfig):
        return None
    token_id = int(config.image_token_id)
    hidden_size = int(config.get_text_config().hidden_size)
    return ImageRules(
        placeholder=_token(folder, token_id),
        placeholder_token_id=token_id,
        tokens_per_image=_tokens_per_image(config),
        hidden_size=hidden_size,
        embedding_layout=embedding_layout(checkpoint.fingerprint(folder), dtype, hidden_size),
    )


def require_images(config: PreTrainedConfig) -> LlavaConfig:
    """Raises ConfigError, naming the model's type, if the model has no supported vision encoder."""
    if isinstance(config, LlavaConfig):
        return config
    what = "its images cannot be encoded" if hasattr(config, "vision_config") else "it does not accept images"
    raise ConfigError(f"roles: models of type {config.model_type!r} have no encode role: {what}; {_KNOWN}")


_KNOWN = f"encoded are those of {', '.join(FAMILIES)} with {' or '.join(TOWERS)}"


def _tokens_per_image(config: LlavaConfig) -> int:
    tower: Any = config.vision_config
    if tower.model_type not in TOWERS:
        raise ConfigError(f"engine.model: vision towers of type {tower.model_type!r} cannot be served; {_KNOWN}")
    patches = (int(tower.image_size) // int(tower.patch_size)) ** 2
    dropped = config.vision_feature_select_strategy == "default"
    return patches + TOWERS[tower.model_type] - int(dropped)


def _token(folder: Path, token_id: int) -> str:
    """Returns the text of an added token; empty if the folder has no tokenizer."""
    path = folder / "tokenizer.json"
    added = json.loads(path.read_bytes()).get("added_tokens", []) if path.is_file() else []
    return next((str(token["content"]) for token in added if token["id"] == token_id), "")
