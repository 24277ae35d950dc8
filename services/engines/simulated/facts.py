"""The facts of the simulated model, for the engine and for the encoder."""

import hashlib

from services.engines.base import ModelFacts
from services.engines.kv import KvLayout, embedding_layout
from services.engines.rules import ImageRules
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.tokens import IMAGE, Vocabulary


def kv_layout(config: SimulatedConfig, vocabulary: Vocabulary) -> KvLayout:
    """Returns the layout of the KV pool."""
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
    """Returns the facts. `layout` is that of the caller's pool: of KV, or of embeddings."""
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
        settings=(("kv_blocks", str(config.num_blocks)), ("max_sequences", str(config.max_batch))),
        data_parallel_ranks=config.data_parallel_ranks,
    )


def _image_rules(config: SimulatedConfig, vocabulary: Vocabulary) -> ImageRules | None:
    if not config.image_tokens or vocabulary.image_token_id is None:
        return None
    size = config.image_hidden_size
    layout = embedding_layout(kv_layout(config, vocabulary).model, "float32", size)
    return ImageRules(IMAGE, vocabulary.image_token_id, config.image_tokens, size, layout)
