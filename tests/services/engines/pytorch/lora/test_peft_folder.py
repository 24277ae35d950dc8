"""An adapter that is not supported is refused when it is read, by the name of its key or of its weight."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.adapters import save_adapter
from support.engines.embedded import Checkpoint

from baton.errors import ConfigError
from services.engines.lora.peft_folder import read_peft_config, read_weights


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("peft_type", "IA3"),
        ("r", 17),
        ("r", 0),
        ("lora_alpha", None),
        ("target_modules", None),
        ("a_key_of_a_later_version", {"on": True}),
    ],
)
def test_a_key_that_is_not_supported_is_named(llama: Checkpoint, tmp_path: Path, key: str, value: object) -> None:
    folder = save_adapter(tmp_path / "one", llama.path, seed=1, **{key: value})
    with pytest.raises(ConfigError) as refused:
        read_peft_config(folder, max_rank=16)
    assert refused.value.message.startswith(f"{key}:")


@pytest.mark.parametrize("bad", ["lm_head.weight", "model.layers.0.mlp.gate_proj.lora_magnitude_vector"])
def test_a_weight_that_is_no_matrix_of_lora_is_named(llama: Checkpoint, tmp_path: Path, bad: str) -> None:
    folder = save_adapter(tmp_path / "one", llama.path, seed=1)
    weights = {**load_file(folder / "adapter_model.safetensors"), f"base_model.model.{bad}": torch.zeros(2)}
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=bad):
        read_weights(folder, read_peft_config(folder, max_rank=16))


def test_a_weight_that_is_not_a_number_is_named(llama: Checkpoint, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "one", llama.path, seed=1)
    weights = load_file(folder / "adapter_model.safetensors")
    name = sorted(weights)[0]
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="not finite"):
        read_weights(folder, read_peft_config(folder, max_rank=16))
