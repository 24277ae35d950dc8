"""Small random adapters in PEFT's layout, and the reference: transformers' model with one merged into its weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.engines.checkpoints import PlainModel
from transformers import AutoConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = EVERYWHERE,
    layers: str = "",
    **keys: object,
) -> Path:
    """Writes an adapter of the model's text layers, large enough to change greedy answers. `keys` are of its
    configuration, and may replace any.
    """
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, (rows, columns) in _linear_shapes(model, layers).items():
        if module.endswith(tuple(targets)):
            name = f"base_model.model.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns) / columns**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank) * 0.1
    assert tensors
    config: dict[str, object] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "exclude_modules": ".*vision_tower.*",
        **keys,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: Path, adapter: Path) -> PlainModel:
    """The plain library's model with `peft`'s own reading of the adapter merged into its weights."""
    from peft import PeftModel  # not in the environment of `make vllm`

    plain = PlainModel(model)
    plain._model = PeftModel.from_pretrained(plain._model, str(adapter)).merge_and_unload().eval()
    return plain


def _linear_shapes(model: Path, layers: str) -> Mapping[str, tuple[int, int]]:
    config = AutoConfig.from_pretrained(model)
    layers = layers or ("model.language_model.layers" if hasattr(config, "vision_config") else "model.layers")
    text = config.get_text_config()
    hidden, inner = text.hidden_size, text.intermediate_size
    query, key = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"{layers}.{n}.{name}": shape for n in range(text.num_hidden_layers) for name, shape in shapes.items()}
