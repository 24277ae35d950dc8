"""What is built for others to install: the sdist, the wheel that comes of it, and what runs with nothing else."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"baton", "rpc", "discovery", "media", "services", "router", "client"}


@dataclass(frozen=True)
class Built:
    """The names of the files in both, without the sdist's own folder; and a folder that has only the wheel's."""

    sdist: set[str]
    wheel: set[str]
    installed: Path

    def run(self, *words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
        """Python, in an empty folder, with the wheel's files before all others."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        environment["PYTHONPATH"] = str(self.installed)
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """As a release is built: nobody runs `make protos` between the sdist and the wheel. Without a network."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder))
    (sdist,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--quiet")
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", "--no-build-isolation", *offline, "--wheel-dir", str(folder), str(sdist))
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", *offline, "--target", str(folder / "installed"), str(wheel))
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return Built(names, set(zipfile.ZipFile(wheel).namelist()), folder / "installed")


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "path",
    [
        "baton/inference/v1/generate_pb2.py",
        "baton/inference/v1/inference_service_pb2_grpc.py",
        "baton/inference/v1/generate_pb2.pyi",
        "baton/engine/v1/decode_pb2.py",
        "client/__main__.py",
        "client/traces/page.html",
        "rpc/errors.py",
        "services/engines/pytorch/engine.py",
    ],
)
def test_the_wheel_contains(built: Built, path: str) -> None:
    assert path in built.wheel


def test_the_wheel_has_only_our_packages(built: Built) -> None:
    assert {path.split("/")[0] for path in built.wheel if ".dist-info/" not in path} == PACKAGES


def test_every_proto_has_its_stubs_in_the_wheel(built: Built) -> None:
    protos = {path.removesuffix(".proto") for path in built.wheel if path.endswith(".proto")}
    assert protos
    assert {f"{proto}_pb2.py" for proto in protos} <= built.wheel


def test_the_sdist_has_what_was_written_and_nothing_that_was_generated(built: Built) -> None:
    assert {
        "protos/baton/inference/v1/generate.proto",
        "tools/stubs.py",
        "models/demo/model.safetensors",
    } <= built.sdist
    assert not [path for path in built.sdist if "_pb2" in path or "node_modules" in path or path.startswith(".venv")]


def test_it_says_its_version(built: Built, tmp_path: Path) -> None:
    done = built.run("-m", "client", "--version", folder=tmp_path)
    version = re.search('^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert done.stdout == f"baton {version[1]}\n"


@pytest.mark.parametrize("module", ["client", "router", "services"])
def test_every_program_has_help(built: Built, tmp_path: Path, module: str) -> None:
    done = built.run("-m", module, "--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def test_it_is_the_wheel_that_runs(built: Built, tmp_path: Path) -> None:
    done = built.run(
        "-c", "import router, baton.inference.v1 as b; print(router.__file__, b.__path__)", folder=tmp_path
    )
    assert done.stdout.count(str(built.installed)) == 2


def test_a_router_starts_from_a_configuration_of_ones_own(built: Built, tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text("registry: {endpoints: ['127.0.0.1:2379']}\n")
    done = built.run("-m", "router", "router.yaml", "--print-config", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "listen" in done.stdout


def test_a_local_cluster_needs_a_checkout_and_says_so(built: Built, tmp_path: Path) -> None:
    done = built.run("-m", "client", "up", folder=tmp_path)
    assert done.returncode == 2
    assert f"a local cluster runs from a checkout of Baton, and {built.installed} has no deploy/config" in done.stderr
