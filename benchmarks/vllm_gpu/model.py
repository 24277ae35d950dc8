"""A checkpoint folder of 8B shape without weights, which vLLM makes up, and with a tokenizer of as many words."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig

VOCABULARY = 128_256


def shape(*, tiny: bool) -> LlamaConfig:
    """Llama 3 8B's, or one that a CPU computes in no time."""
    sizes = (320, 64, 128, 2, 2, 1, 32) if tiny else (VOCABULARY, 4096, 14336, 32, 32, 8, 128)
    vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim = sizes
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )


def write_model(folder: Path, *, tiny: bool) -> Path:
    """Writes the configuration and the tokenizer; every id decodes to a word of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = shape(tiny=tiny)
    config.save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1, **{f"w{index}": index for index in range(2, config.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
