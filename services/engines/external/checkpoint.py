"""The facts of a checkpoint in Hugging Face format that engines of other packages share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engines.kv import KvLayout
from services.engines.pytorch.model.checkpoint import read_json


def read_model(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration, and that of its language model. Raises ConfigError for a folder that is no checkpoint."""
    whole = read_json(folder / "config.json")
    return whole, {**whole, **whole.get("text_config", {})}


def kv_layout(
    identity: Mapping[str, object], model: Mapping[str, Any], dtype: str, block_tokens: int, number_bytes: float
) -> KvLayout:
    """The layout of KV inside an engine. Its digest covers the identity, which both sides of a handoff must share."""
    heads = int(model["num_attention_heads"])
    kv_heads = int(model.get("num_key_value_heads") or heads)
    head_dim = int(model.get("head_dim") or int(model["hidden_size"]) // heads)
    layers = int(model["num_hidden_layers"])
    return KvLayout(
        model=json.dumps(identity, sort_keys=True),
        dtype=dtype,
        num_layers=layers,
        kv_factor=2,
        kv_heads=kv_heads,
        block_tokens=block_tokens,
        head_dim=head_dim,
        block_bytes=int(layers * 2 * kv_heads * block_tokens * head_dim * number_bytes),
    )
