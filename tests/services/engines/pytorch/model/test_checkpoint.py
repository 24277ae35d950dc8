"""The facts that the engine reads from its checkpoint."""

import json
import os
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.engines.embedded import Checkpoint

from baton.errors import ConfigError
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.checkpoint import changes, fingerprint, model_files


@pytest.fixture
def copy(llama: Checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama.path, tmp_path / "copy"))


def test_equal_checkpoints_have_equal_fingerprints(llama: Checkpoint, copy: Path) -> None:
    assert fingerprint(copy) == fingerprint(llama.path)


def test_other_weights_have_another_fingerprint(llama: Checkpoint, copy: Path) -> None:
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(copy) != fingerprint(llama.path)


def test_a_change_that_the_samples_of_a_large_file_miss_is_found_by_its_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(100 << 20)
    found, seen, times = fingerprint(tmp_path), changes(tmp_path), weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"x")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint(tmp_path) == found
    assert changes(tmp_path) != seen


def test_another_configuration_has_another_fingerprint(llama: Checkpoint, copy: Path) -> None:
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    assert fingerprint(copy) != fingerprint(llama.path)


def test_the_tokenizer_is_passed_on_as_it_is(llama: Checkpoint) -> None:
    files = model_files(llama.path)
    assert files.tokenizer_json == (llama.path / "tokenizer.json").read_bytes()
    assert files.tokenizer_config_json == (llama.path / "tokenizer_config.json").read_text()
    assert files.chat_template == ""


def test_a_folder_without_a_tokenizer_has_empty_files(tmp_path: Path) -> None:
    files = model_files(tmp_path)
    assert (files.tokenizer_json, files.tokenizer_config_json, files.chat_template) == (b"", "", "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "T"),
        ("chat_template.json", json.dumps({"chat_template": "T"})),
        ("tokenizer_config.json", json.dumps({"chat_template": "T"})),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "tool", "template": "X"}, {"name": "default", "template": "T"}]}),
        ),
    ],
)
def test_a_chat_template_is_found_wherever_checkpoints_keep_it(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert model_files(tmp_path).chat_template == "T"


async def test_the_facts_are_those_of_the_checkpoint(llama: Checkpoint) -> None:
    async with llama.engine(name="small") as engine:
        facts = engine.facts
    assert (facts.name, facts.engine, facts.vocab_size, facts.eos_token_ids) == ("small", "pytorch", 320, (2,))
    assert facts.max_context_tokens == 2048
    assert facts.layout.block_bytes == 3 * 2 * 2 * 16 * 16 * 4


async def test_engines_of_one_checkpoint_have_one_layout(llama: Checkpoint) -> None:
    async with llama.engine() as one, llama.engine(kv_cache_bytes=1 << 20) as other:
        assert one.facts.layout.digest == other.facts.layout.digest


async def test_ends_are_collected_from_generation_settings_too(copy: Path, llama: Checkpoint) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    async with Checkpoint(copy, llama.plain).engine() as engine:
        assert engine.facts.eos_token_ids == (5, 2)


async def test_the_context_is_no_longer_than_the_pool(llama: Checkpoint) -> None:
    async with llama.engine(kv_cache_bytes=11 * 12288) as engine:
        assert engine.facts.max_context_tokens == 160


async def test_a_pool_of_no_use_is_refused(llama: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes.*12288"):
        async with llama.engine(kv_cache_bytes=20_000):
            pass


def test_a_served_name_is_the_folders_unless_it_is_given(tmp_path: Path) -> None:
    assert PyTorchConfig(model=tmp_path / "qwen").served_name == "qwen"
    assert PyTorchConfig(model=tmp_path / "qwen", name="x").served_name == "x"


def test_a_size_may_be_written_with_its_unit(tmp_path: Path) -> None:
    assert PyTorchConfig.model_validate({"model": tmp_path, "kv_cache_bytes": "2GiB"}).kv_cache_bytes == 2 << 30


def test_a_step_that_cannot_hold_every_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="max_step_tokens"):
        PyTorchConfig(model=tmp_path, max_sequences=64, max_step_tokens=64)
