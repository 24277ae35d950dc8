"""The wheel, built as pip builds it, without a network."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("rpc", "discovery", "services", "router", "client", "protos")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files in it."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(built), str(source)], check=True, timeout=100)
    (file,) = built.glob("*.whl")
    return set(zipfile.ZipFile(file).namelist())


@pytest.mark.parametrize(
    "path",
    [
        "baton/inference/v1/generate_pb2.py",
        "baton/inference/v1/inference_service_pb2_grpc.py",
        "baton/inference/v1/generate_pb2.pyi",
        "baton/engine/v1/decode_pb2.py",
        "client/__main__.py",
        "rpc/errors.py",
        "services/engines/pytorch/engine.py",
    ],
)
def test_the_wheel_contains(wheel: set[str], path: str) -> None:
    assert path in wheel


def test_the_wheel_has_only_our_packages(wheel: set[str]) -> None:
    tops = {path.split("/")[0] for path in wheel if ".dist-info/" not in path}
    assert tops == {"baton", "rpc", "discovery", "services", "router", "client"}


def test_the_wheel_has_the_command(wheel: set[str]) -> None:
    assert any(path.endswith(".dist-info/entry_points.txt") for path in wheel)
