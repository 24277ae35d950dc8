"""Checkpoints for tests: the demo's, and small random ones; and the plain library model to compare with."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    BertConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    RobertaConfig,
)

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"

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


def save_llama(folder: Path, head_dim: int = 16) -> Path:
    """A random Llama of 0.3 M parameters, with weights large enough that greedy text is not constant."""
    return _save(LlamaConfig(**{**_SIZES, "head_dim": head_dim}), folder)


def save_qwen3(folder: Path, head_dim: int = 16, positions: int = 2048, vocabulary: int = 320) -> Path:
    """A random Qwen3, which normalises queries and keys."""
    sizes = {"head_dim": head_dim, "max_position_embeddings": positions, "vocab_size": vocabulary}
    return _save(Qwen3Config(**{**_SIZES, **sizes}), folder)


def save_bert(folder: Path, kind: type[PretrainedConfig] = BertConfig) -> Path:
    """A random BERT of 64 positions, whose tokenizer puts <s> and </s> around a text."""
    sizes = {key: value for key, value in _SIZES.items() if not key.startswith(("num_key", "head_dim", "tie"))}
    config = kind(**{**sizes, "max_position_embeddings": 64, "pad_token_id": 0})
    torch.manual_seed(11)
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer = _byte_tokenizer()
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def save_roberta(folder: Path) -> Path:
    """A random RoBERTa, whose positions begin after the id of padding."""
    return save_bert(folder, RobertaConfig)


def write_sentence_transformers_files(folder: Path, *modes: str, normalizes: bool, max_tokens: int) -> Path:
    """The files that say how a checkpoint's vectors are made; `modes` are keys such as pooling_mode_cls_token."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    settings = {"pooling_mode_mean_tokens": False, **dict.fromkeys(modes, True)}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return folder


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
    """The reference: a checkpoint in transformers, float32, one prompt at a time."""

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
