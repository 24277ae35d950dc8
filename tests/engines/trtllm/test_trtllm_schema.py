"""What an installation accepts, written down, is what the stand-in's tables say of that version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_tensorrt_llm.tables import SAMPLING, SECTIONS, TABLES

from services.engines.trtllm.package import open_package
from services.engines.trtllm_schema import dump

DUMPS = sorted((Path(__file__).parents[2] / "fake_tensorrt_llm" / "dumps").glob("*.json"))


def names(document: object, *path: str) -> set[str]:
    for key in path:
        assert isinstance(document, dict)
        document = document[key]
    assert isinstance(document, list)
    return set(document)


def test_a_dump_of_the_stand_in_is_its_table(version: str) -> None:
    written, table = json.loads(json.dumps(dump(open_package()))), TABLES[version]
    assert written["version"] == version
    assert names(written, "handoff") == set(table.handoff)
    assert names(written, "generate") == set(table.generate)
    assert names(written, "sections", "CacheTransceiverConfig") == set(table.transceiver)


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: path.stem)
def test_the_stand_in_accepts_nothing_that_the_real_one_refuses(path: Path) -> None:
    real = json.loads(path.read_text())
    table = TABLES[real["version"]]
    assert set(table.handoff) == names(real, "handoff")
    assert set(table.generate) <= names(real, "generate")
    assert set(SAMPLING) <= names(real, "sampling")
    for section, fields in {**SECTIONS, "CacheTransceiverConfig": table.transceiver}.items():
        assert set(fields) <= names(real, "sections", section)


def test_without_an_installation_it_says_so() -> None:
    command = [sys.executable, "-m", "services.engines.trtllm_schema"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "needs TensorRT-LLM" in ended.stderr) == (2, True)
