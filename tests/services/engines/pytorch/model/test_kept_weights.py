"""Weights in kept memory: the same ids, without a checkpoint being loaded; and loaded anew where they do not fit."""

import gc
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from support.cluster.processes import ROOT
from support.engines.checkpoints import PlainModel, save_llama
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.engines.families import SERVED
from support.keeping import KeepsHere, keeper_here
from transformers import AutoModelForCausalLM, PreTrainedConfig

from baton.errors import ConfigError
from services.engines.memory.tensor_file import read_tensors, write_tensors
from services.engines.prompt import Prompt
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.model.kept_weights import load_kept

PROMPT = tuple(range(5, 45))
LOADED = "language model loaded"


async def _generate(checkpoint: Checkpoint, keeper: KeepsHere, **options: object) -> tuple[tuple[int, ...], list[str]]:
    """Ids of an engine that starts now, and what its start has logged."""
    with keeper.memory(weights=True) as kept, capture_logs() as logs:
        async with PyTorchEngine(checkpoint.config(**options), kept=kept) as engine:
            ids = (await collect(engine.decode(Prompt(PROMPT), greedy(16)))).ids
    return ids, [str(entry["event"]) for entry in logs]


async def test_an_engine_that_starts_again_gives_the_same_ids_and_loads_nothing(checkpoint: Checkpoint) -> None:
    async with checkpoint.engine() as engine:
        expected = (await collect(engine.decode(Prompt(PROMPT), greedy(16)))).ids
    with keeper_here() as keeper:
        ids, said = await _generate(checkpoint, keeper)
        assert ids == expected
        assert LOADED in said
        for _ in range(2):
            ids, said = await _generate(checkpoint, keeper)
            assert ids == expected
            assert LOADED not in said


@pytest.mark.parametrize("config", SERVED, ids=lambda config: config.model_type)
async def test_every_family_starts_from_kept_weights(config: PreTrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, PlainModel(tmp_path))
    until_end = checkpoint.generate(PROMPT, 16)
    with keeper_here() as keeper:
        for is_loaded in (True, False):
            # Of a GPU memory is kept of fused models alone.
            ids, said = await _generate(checkpoint, keeper, device="cpu")
            assert ids[: len(until_end)] == until_end
            assert (LOADED in said) == is_loaded


@pytest.mark.parametrize("change", ["weights", "times", "generation", "execution", "context"])
async def test_weights_that_do_not_fit_are_loaded_anew_and_it_is_said(tmp_path: Path, change: str) -> None:
    checkpoint = Checkpoint(save_llama(tmp_path), PlainModel(tmp_path), execution="library")
    with keeper_here() as keeper:
        options: dict[str, object] = {"device": "cpu"}
        await _generate(checkpoint, keeper, **options)
        match change:
            case "weights":
                torch.manual_seed(99)
                plain = AutoModelForCausalLM.from_pretrained(tmp_path)
                torch.nn.init.normal_(plain.lm_head.weight)
                plain.save_pretrained(tmp_path)
            case "times":
                os.utime(tmp_path / "model.safetensors")
            case "generation":
                (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
            case "execution":
                checkpoint = replace(checkpoint, execution="fused")
            case "context":
                options |= {"max_context_tokens": 128}
        expected = Checkpoint(tmp_path, PlainModel(tmp_path)).generate(PROMPT, 16)
        ids, said = await _generate(checkpoint, keeper, **options)
        assert ids[: len(expected)] == expected
        assert LOADED in said
        assert "kept weights do not fit; loading the checkpoint" in said
        assert LOADED not in (await _generate(checkpoint, keeper, **options))[1]


def _open_weights() -> int:
    gc.collect()  # engines of other tests
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("baton-weights" in str(link) for link in links)


async def test_a_model_that_the_fused_kernels_refuse_is_refused_as_without_a_keeper(tmp_path: Path) -> None:
    config = next(config for config in SERVED if config.model_type == "phi")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, PlainModel(tmp_path), execution="fused")
    with keeper_here() as keeper, pytest.raises(ConfigError, match=r"engine\.execution"):
        await _generate(checkpoint, keeper)


async def test_adapters_of_fused_kernels_are_refused_as_without_a_keeper(llama: Checkpoint, tmp_path: Path) -> None:
    checkpoint = replace(llama, execution="fused")
    with keeper_here() as keeper, pytest.raises(ConfigError, match=r"engine\.execution: .*engine\.lora"):
        await _generate(checkpoint, keeper, lora={"folder": str(tmp_path)})


def test_a_file_of_tensors_cannot_change() -> None:
    shared = torch.arange(6.0).view(2, 3)
    tensors = {"a": shared, "tied": shared, "b": torch.tensor([1, 2], dtype=torch.bfloat16), "none": torch.empty(0, 4)}
    [descriptor] = write_tensors(tensors, {"fact": [1, "two"]})
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    found = read_tensors([descriptor], torch.device("cpu"))
    assert found.facts == {"fact": [1, "two"]}
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert found.tensors["a"] is found.tensors["tied"]
    assert [tensor.dtype for tensor in found.tensors.values()] == [tensor.dtype for tensor in tensors.values()]


def test_weights_for_which_there_is_no_room_are_used_as_they_were_loaded(tmp_path: Path) -> None:
    checkpoint = Checkpoint(save_llama(tmp_path), PlainModel(tmp_path), execution="fused")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with keeper_here() as keeper, keeper.memory(weights=True) as kept, capture_logs() as logs:
        opened = _open_weights()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
        try:
            model = load_kept(checkpoint.config(device="cpu"), kept.keeper)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
        assert _open_weights() == opened
        assert not keeper.kept.names
    assert model.fused is None
    assert model.module.get_parameter("lm_head.weight").numel()
    assert "weights cannot be kept; the worker goes on without" in [entry["event"] for entry in logs]


def test_the_embedded_engine_imports_transformers_only_to_load() -> None:
    program = "import sys, services.engines.pytorch.engine; print('transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_the_embedded_engine_is_imported_where_no_file_can_be_sealed() -> None:
    program = "import fcntl\nfor name in [each for each in dir(fcntl) if 'SEAL' in each]: delattr(fcntl, name)\n"
    program += "import services.engines.pytorch.engine"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
