"""What the simulated engine says of its model, to the parts that decode and to those that encode."""

import hashlib

from services.engine import ImageRules, ModelFacts
from services.engines.simulated_config import SimulatedConfig
from services.engines.simulated_tokens import IMAGE, Vocabulary
from services.kv import KvLayout, embedding_layout


def kv_layout(config: SimulatedConfig, vocabulary: Vocabulary) -> KvLayout:
    """Of the pool of KV, which has none."""
    fingerprint = hashlib.sha256(vocabulary.files.tokenizer_json).hexdigest()[:16]
    return KvLayout(
        model=f"simulated:{config.name}:{fingerprint}",
        dtype="uint8",
        num_layers=1,
        kv_factor=1,
        kv_heads=1,
        block_tokens=config.block_tokens,
        head_dim=config.block_bytes // config.block_tokens,
        block_bytes=config.block_bytes,
    )


def model_facts(config: SimulatedConfig, vocabulary: Vocabulary, layout: KvLayout, load_seconds: float) -> ModelFacts:
    """`layout` is that of the pool that the asking part has."""
    return ModelFacts(
        name=config.name,
        engine="simulated",
        max_context_tokens=config.context_tokens,
        vocab_size=vocabulary.size,
        max_logprobs=20,
        eos_token_ids=(vocabulary.eos_token_id,),
        layout=layout,
        files=vocabulary.files,
        load_seconds=load_seconds,
        images=_image_rules(config, vocabulary),
    )


def _image_rules(config: SimulatedConfig, vocabulary: Vocabulary) -> ImageRules | None:
    if not config.image_tokens or vocabulary.image_token_id is None:
        return None
    size = config.image_hidden_size
    layout = embedding_layout(kv_layout(config, vocabulary).model, "float32", size)
    return ImageRules(IMAGE, vocabulary.image_token_id, config.image_tokens, size, layout)
