"""A dump of an installation's arguments matches the stand-in's tables of that version."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from fake_tensorrt_llm.arguments import LoraConfig
from fake_tensorrt_llm.installation import installed
from fake_tensorrt_llm.tables import SAMPLING, TABLES, VersionTable

from services.engines.trtllm.package import open_package
from tools.trtllm_arguments import dump

SECTIONS = ("kv_cache_config", "scheduler_config", "cache_transceiver_config", "cuda_graph_config", "lora_config")
ROOT = Path(__file__).parents[4]
DUMPS = sorted((Path(__file__).parents[3] / "fake_tensorrt_llm" / "dumps").glob("*.json"))


def names(document: object, *path: str) -> set[str]:
    for key in path:
        assert isinstance(document, dict)
        document = document[key]
    assert isinstance(document, list)
    return set(document)


def fields(table: VersionTable, section: str) -> set[str]:
    """The fields of one section in a table."""
    annotation = table.arguments.pytorch.model_fields[section].annotation
    [model] = [one for one in (annotation, *get_args(annotation)) if hasattr(one, "model_fields")]
    return set(model.model_fields)


def test_a_dump_of_the_stand_in_is_its_table(version: str) -> None:
    written, table = json.loads(json.dumps(dump(open_package()))), TABLES[version]
    assert written["version"] == version
    assert names(written, "handoff") == set(table.handoff)
    assert names(written, "generate") == set(table.generate)
    arguments = table.arguments.pytorch.model_fields
    assert names(written, "arguments") == set(arguments)
    assert names(written, "sections", "lora_config") == set(LoraConfig.model_fields)
    assert names(written, "sections", "cache_transceiver_config") == fields(table, "cache_transceiver_config")
    assert names(written, "metrics") == {table.log_request, "log_iteration_stats"}


def accepts(real: object, table: VersionTable) -> None:
    """Fails unless a real installation has everything that the stand-in has, and the same fields of handoffs."""
    assert set(table.handoff) == names(real, "handoff")
    assert set(table.generate) <= names(real, "generate")
    assert set(SAMPLING) <= names(real, "sampling")
    assert set(table.arguments.pytorch.model_fields) <= names(real, "arguments")
    for section in SECTIONS:
        assert fields(table, section) <= names(real, "sections", section)
    with installed(table.version):
        ours = json.loads(json.dumps(dump(open_package())))
    for called in ("scheduling", "methods", "shared_tensor", "metrics"):
        assert names(ours, called) <= names(real, called)


def test_the_stand_in_accepts_nothing_that_the_real_one_refuses() -> None:
    if not DUMPS:
        pytest.skip("no installation of TensorRT-LLM has been dumped: `python -m tools.trtllm_arguments`")
    for path in DUMPS:
        real = json.loads(path.read_text())
        accepts(real, TABLES[real["version"]])


def shipped() -> list[Path]:
    """The files for this engine in deploy/engine_configs: at least one a role and family."""
    found = sorted((ROOT / "deploy" / "engine_configs").glob("*/*.yaml"))
    assert {path.stem for path in found} == {"agg", "prefill", "decode", "encode"}
    return found


def load_all(arguments: Any, checkpoint: Path) -> None:
    """Fails unless each shipped file is valid for these arguments, `TorchLlmArgs` or the stand-in's, key by key."""
    for path in shipped():
        settings = yaml.safe_load(path.read_text())
        loaded = arguments(model=str(checkpoint), **settings)
        for key, value in settings.items():
            section = getattr(loaded, key)
            for name in value if isinstance(value, dict) else ():
                assert hasattr(section, name), f"{path}: {key}.{name}"


def test_the_shipped_files_are_valid_for_the_arguments_of_each_version(version: str, checkpoint: Path) -> None:
    load_all(open_package().llmapi.TorchLlmArgs, checkpoint)
    with pytest.raises(ValueError, match="max_batch_sise"):
        open_package().llmapi.TorchLlmArgs(model=str(checkpoint), max_batch_sise=3)
    assert TABLES[version].version == version


@pytest.mark.requires_trtllm
def test_the_shipped_files_are_valid_for_the_real_arguments(real_trtllm: None, checkpoint: Path) -> None:
    """Not run yet: it needs a machine with TensorRT-LLM."""
    load_all(open_package().llmapi.TorchLlmArgs, checkpoint)


@pytest.mark.parametrize("number", TABLES)
def test_a_dump_that_lacks_something_fails(number: str) -> None:
    with installed(number):
        real = json.loads(json.dumps(dump(open_package())))
    accepts(real, TABLES[number])
    for key in ("handoff", "generate", "sampling", "arguments", "methods", "metrics"):
        with pytest.raises(AssertionError):
            accepts({**real, key: real[key][1:]}, TABLES[number])


@pytest.mark.requires_trtllm
def test_the_installation_here_has_what_the_stand_in_has(real_trtllm: None) -> None:
    package = open_package()
    table = TABLES.get(str(package.version))
    if table is None:
        pytest.skip(f"the stand-in has no table for {package.version}; it has {', '.join(TABLES)}")
    accepts(json.loads(json.dumps(dump(package), default=str)), table)


def test_without_an_installation_it_says_so() -> None:
    command = [sys.executable, "-m", "tools.trtllm_arguments"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "needs TensorRT-LLM" in ended.stderr) == (2, True)
