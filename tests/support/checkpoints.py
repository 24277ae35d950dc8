"""Checkpoints for tests: the demo's, and small random ones; and the plain library model to compare with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_llama(folder: Path) -> Path:
    """A random Llama of 0.3 M parameters, with weights large enough that greedy text is not constant."""
    return _save(LlamaConfig(**_SIZES), folder)


def save_qwen3(folder: Path) -> Path:
    """A random Qwen3, which normalises queries and keys."""
    return _save(Qwen3Config(**_SIZES), folder)


def _save(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


def _byte_tokenizer() -> Tokenizer:
    """A vocabulary of all bytes, after three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


class PlainModel:
    """A checkpoint in the plain library, float32, one prompt at a time: what right means."""

    def __init__(self, path: Path) -> None:
        config = AutoConfig.from_pretrained(path)
        kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        self._model = kind.from_pretrained(path, dtype=torch.float32).eval()
        self.vocab_size = int(config.get_text_config().vocab_size)
        self._processor = AutoProcessor.from_pretrained(path) if hasattr(config, "vision_config") else None

    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Greedy ids after the prompt, the final end-of-sequence token included."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
        return tuple(out[0, len(prompt) :].tolist())

    def generate_about(self, prompt: str, pictures: Sequence[Image.Image], max_tokens: int) -> tuple[int, ...]:
        """Greedy ids after a prompt, special tokens and placeholders written out, by the model's own processor."""
        assert self._processor is not None
        inputs = self._processor(text=[prompt], images=list(pictures), add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            out = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        return tuple(out[0, inputs.input_ids.shape[1] :].tolist())
