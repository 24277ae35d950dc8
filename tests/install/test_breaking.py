"""Breaking changes of the protos are found."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = ROOT / "tools" / "buf" / "node_modules" / ".bin" / "buf"
RELEASED = ROOT / "tools" / "buf" / "released.binpb"

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed: make lint does it, where Node.js is")


def breaking(protos: Path) -> str:
    command = [str(BUF), "breaking", str(protos), "--against", str(RELEASED)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


def test_the_protos_break_no_client() -> None:
    assert breaking(ROOT / "protos") == ""


def test_a_field_that_is_taken_away_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("*.py*", "__pycache__"))
    proto = tmp_path / "protos" / "baton" / "inference" / "v1" / "tokenize.proto"
    proto.write_text(proto.read_text().replace("  optional bool keep_special_tokens = 3;\n", ""))
    assert "keep_special_tokens" in breaking(tmp_path / "protos")
