"""Supported checkpoints, compared with transformers, and unsupported ones, refused by name."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from support.engines.checkpoints import PlainModel
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.engines.families import SERVED, SMALL
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from baton.errors import ConfigError
from services.engines.prompt import Prompt
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.loading import load_model
from services.engines.pytorch.model.support import FAMILIES, text_shape

REFUSED = [
    (Gemma2Config(), "gemma2.*softcap"),
    (Gemma3TextConfig(), "gemma3_text.*window"),
    (GptOssConfig(), "gpt_oss.*sinks"),
    (DeepseekV3Config(), "deepseek_v3.*latent"),
    (MambaConfig(), "mamba.*not made of blocks"),
    (MistralConfig(sliding_window=4096), "mistral.*at most 4096"),
    (Cohere2Config(), "cohere2.*slides"),
    (Qwen2Config(use_sliding_window=True, max_window_layers=0, sliding_window=64), "qwen2.*at most 64"),
    (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "llama.*dynamic"),
]


def test_every_family_that_is_named_is_compared() -> None:
    # Other tests use LLaVA as the demonstration checkpoint.
    assert {config.model_type for config in SERVED} | {"llava"} == set(FAMILIES)


@pytest.mark.parametrize("config", SERVED, ids=lambda config: config.model_type)
async def test_a_family_gives_the_ids_of_generate(config: PreTrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, PlainModel(tmp_path))
    prompts = [tuple(torch.randint(3, 200, (length,)).tolist()) for length in (1, 20, 77)]
    sampling = greedy(12)
    async with checkpoint.engine(max_sequences=8, max_step_tokens=32) as engine:
        generated = await asyncio.gather(*(collect(engine.decode(Prompt(p), sampling)) for p in prompts))
    for one, prompt in zip(generated, prompts, strict=True):
        until_end = checkpoint.generate(prompt, 12)
        assert one.ids[: len(until_end)] == until_end


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda value: getattr(value, "model_type", ""))
def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text_shape(config, None)


def test_a_sliding_window_is_served_where_no_context_reaches_it() -> None:
    assert text_shape(MistralConfig(sliding_window=4096), 4096).max_context_tokens == 4096


def test_long_rope_ends_where_its_angles_would_change() -> None:
    factors = {"rope_type": "longrope", "long_factor": [2.0] * 6, "short_factor": [1.0] * 6, "rope_theta": 1e4}
    config = Phi3Config(**SMALL, original_max_position_embeddings=128, rope_parameters=factors)
    assert text_shape(config, None).max_context_tokens == 128


def test_an_unknown_family_is_refused_with_the_list_of_those_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    with pytest.raises(ConfigError, match=r"'opt'.*llama"):
        load_model(PyTorchConfig(model=tmp_path))


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(ConfigError, match="nonsense"):
        load_model(PyTorchConfig(model=tmp_path))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.model.*config\.json"):
        load_model(PyTorchConfig(model=tmp_path))


def test_a_checkpoint_without_weights_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama.path / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"engine\.model"):
        load_model(PyTorchConfig(model=tmp_path))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(llama.path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((llama.path / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"lacks weights: model\.norm\.weight"):
        load_model(PyTorchConfig(model=tmp_path))


def test_the_vision_tower_is_not_kept(demo: Checkpoint) -> None:
    module = load_model(demo.config()).module
    assert not [name for name, _ in module.named_parameters() if "vision" in name or "projector" in name]
