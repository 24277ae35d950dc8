"""A small configuration of each model type that the embedded engine serves, but of LLaVA: that is the demo."""

from transformers import (
    Cohere2Config,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

SMALL = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
SERVED = [
    LlamaConfig(**SMALL),
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL, head_dim=16),
    MistralConfig(**SMALL, sliding_window=None),
    MixtralConfig(**SMALL, num_local_experts=4),
    Qwen3MoeConfig(**SMALL, **EXPERTS),
    Phi3Config(**SMALL),
    PhiConfig(**SMALL),
    Olmo2Config(**SMALL),
    GraniteConfig(**SMALL, logits_scaling=4.0),
    SmolLM3Config(**SMALL),
    Glm4Config(**SMALL, head_dim=12),
    Cohere2Config(**SMALL, sliding_window=512),
]
