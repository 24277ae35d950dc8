"""How images stand in the prompts of a checkpoint that TensorRT-LLM serves, and which checkpoints it cannot serve."""

import json
from pathlib import Path
from typing import Any

from rpc.errors import ConfigError
from services.engine import ImageRules
from services.engines.pytorch.checkpoint import fingerprint
from services.kv import embedding_layout

# TensorRT-LLM has no encoder of their own for these.
_WITHOUT_ENCODER = ("Llama4ForConditionalGeneration",)
_DTYPES = ("float32", "float16", "bfloat16")


def image_rules(folder: Path, model: dict[str, Any]) -> ImageRules | None:
    """How images stand in prompts; None for a model without, and for one whose images cannot be served."""
    if "vision_config" not in model or problem(model):
        return None
    token_id = int(model.get("image_token_id", model.get("image_token_index", -1)))
    hidden_size = int({**model, **model.get("text_config", {})}["hidden_size"])
    return ImageRules(
        placeholder=_token(folder, token_id),
        placeholder_token_id=token_id,
        tokens_per_image=0,
        hidden_size=hidden_size,
        embedding_layout=embedding_layout(fingerprint(folder), embedding_dtype(model), hidden_size),
    )


def require_images(folder: Path, model: dict[str, Any]) -> ImageRules:
    """Raises ConfigError saying why nothing of this model can be encoded."""
    rules = image_rules(folder, model)
    if rules is None:
        raise ConfigError(f"roles: {folder} has no encode role: {problem(model) or 'it takes no images'}")
    return rules


def problem(model: dict[str, Any]) -> str:
    """Why a model's images cannot be served, though it may have some; empty if nothing speaks against it."""
    for architecture in model.get("architectures") or ():
        if architecture in _WITHOUT_ENCODER:
            return f"{architecture} has no encoder that runs alone"
    text = {**model, **model.get("text_config", {})}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "mrope_section" in rope or "mrope" in (rope.get("type"), rope.get("rope_type")):
        return "its positions have several dimensions (mRoPE), which embeddings do not carry"
    if "image_token_id" not in model and "image_token_index" not in model:
        return "its configuration names no image_token_id"
    return ""


def embedding_dtype(model: dict[str, Any]) -> str:
    """What the rows of embeddings are made of."""
    text = {**model, **model.get("text_config", {})}
    named = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    return named if named in _DTYPES else "bfloat16"


def _token(folder: Path, token_id: int) -> str:
    """The text of an added token; empty where the folder has no tokenizer."""
    path = folder / "tokenizer.json"
    added = json.loads(path.read_bytes()).get("added_tokens", []) if path.is_file() else []
    return next((str(token["content"]) for token in added if token["id"] == token_id), "")
