"""Which checkpoints this engine supports, and why it refuses others."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = (
    "cohere2",
    "glm4",
    "granite",
    "llama",
    "llava",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Model types that the tests compare with transformers' own `generate`."""

_REASONS = {
    "gemma2": "it caps attention scores (softcap) and slides its attention window",
    "gemma3": "it slides its attention window, with other rotary angles in those layers",
    "gemma3_text": "it slides its attention window, with other rotary angles in those layers",
    "gpt_oss": "it uses attention sinks and a sliding window",
    "deepseek_v2": "its keys and values differ in size (latent attention)",
    "deepseek_v3": "its keys and values differ in size (latent attention)",
    "jamba": "it mixes in Mamba layers, whose state is not made of blocks",
    "bamba": "it mixes in Mamba layers, whose state is not made of blocks",
    "mamba": "its state is not made of blocks",
    "mamba2": "its state is not made of blocks",
    "zamba2": "it mixes in Mamba layers, whose state is not made of blocks",
    "qwen3_next": "it mixes in linear attention, whose state is not made of blocks",
}


@dataclass(frozen=True, slots=True)
class TextShape:
    """The parts of a model's configuration that the engine uses."""

    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int


def text_shape(config: "PreTrainedConfig", max_context_tokens: int | None) -> TextShape:
    """Returns the shape of the model's text part. Raises ConfigError, naming the model's type, if it is
    not supported.
    """
    text = config.get_text_config()
    reason = _REASONS.get(config.model_type) or _REASONS.get(text.model_type) or _unsupported_feature(text)
    if reason is None and not {config.model_type, text.model_type} <= set(FAMILIES):
        reason = "it is not one of the families that are checked against transformers"
    if reason is not None:
        raise _refusal(config, f"{reason}; served are {', '.join(FAMILIES)}")
    heads = int(text.num_attention_heads)
    shape = TextShape(
        num_layers=int(text.num_hidden_layers),
        query_heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        vocab_size=int(text.vocab_size),
        max_context_tokens=min(_context_limit(text), max_context_tokens or _context_limit(text)),
    )
    window = _sliding_window(text)
    if window is not None and shape.max_context_tokens > window:
        raise _refusal(
            config,
            f"its attention window slides after {window} tokens; it can be served without that "
            f"if max_context_tokens is at most {window}",
        )
    return shape


def _refusal(config: "PreTrainedConfig", reason: str) -> ConfigError:
    return ConfigError(f"engine.model: models of type {config.model_type!r} cannot be served: {reason}")


def _unsupported_feature(text: "PreTrainedConfig") -> str | None:
    if getattr(text, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps attention scores (softcap)"
    if getattr(text, "v_head_dim", None) or getattr(text, "kv_lora_rank", None):
        return "its keys and values differ in size (latent attention)"
    odd_layers = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd_layers:
        return f"it has layers of type {', '.join(sorted(odd_layers))}"
    if _rope_type(text) == "dynamic":
        return "its rotary angles depend on the longest sequence of a batch (rope type 'dynamic')"
    return None


def _rope_type(text: "PreTrainedConfig") -> str:
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return str(parameters.get("rope_type", "default"))


def _context_limit(text: "PreTrainedConfig") -> int:
    """Returns the model's context. With 'longrope' it ends where the angles would change with the length
    of the batch.
    """
    limit = int(text.max_position_embeddings)
    if _rope_type(text) == "longrope":
        parameters = getattr(text, "rope_parameters", None) or {}
        of_the_model = getattr(text, "original_max_position_embeddings", None)
        original = parameters.get("original_max_position_embeddings") or of_the_model
        return min(limit, int(original or limit))
    return limit


def _sliding_window(text: "PreTrainedConfig") -> int | None:
    """Returns the window, if any layer uses one."""
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    active = "sliding_attention" in layer_types if layer_types else getattr(text, "use_sliding_window", True)
    return int(window) if window and active else None
