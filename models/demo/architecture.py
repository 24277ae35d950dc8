"""The model's shape: LLaVA's layout in miniature."""

from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from models.demo.exercises.exercise import IMAGE
from models.demo.exercises.generate_data import BOS, EOS
from models.demo.exercises.scenes import CELL, SIDE
from models.demo.tokenizing import CONTEXT_TOKENS, PAD, SPECIAL_TOKENS, VOCABULARY_SIZE

BOS_ID, EOS_ID, PAD_ID, IMAGE_ID = (SPECIAL_TOKENS.index(token) for token in (BOS, EOS, PAD, IMAGE))

TOWER_WIDTH = 128


def model_config() -> LlavaConfig:
    """Returns a tower that makes one token of each patch, a two-layer projector, and a Llama with grouped-query
    attention.
    """
    return LlavaConfig(  # type: ignore[call-arg]
        vision_config=_vision_config(),
        text_config=_text_config(),
        image_token_index=IMAGE_ID,
        image_seq_length=(SIDE // CELL) ** 2,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def _vision_config() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=TOWER_WIDTH,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=CELL,
        projection_dim=TOWER_WIDTH,
    )


def _text_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
