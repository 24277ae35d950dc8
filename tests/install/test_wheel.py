"""The sdists and wheels of baton-client and baton-serving: their content, and that they run; baton-http2 is beside."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools import structure

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "packaging" / "client"
HTTP2 = ROOT / "packaging" / "http2"
PACKAGES = {*structure.PACKAGES} - {"baton", "baton_http2"}
# Folders that a user may well have where the command is run.
COMMON_NAMES = ("cli", "client", "devtools", "discovery", "media", "router", "rpc", "runtime", "services")


@dataclass(frozen=True)
class Built:
    """The names of the files in sdists, without their own folders, and in wheels; folders with the installed wheels."""

    sdist: set[str]
    wheel: set[str]
    client_sdist: set[str]
    client_wheel: set[str]
    requires: set[str]
    client_requires: set[str]
    client_alone: Path
    installed: Path

    def run(self, *words: str, folder: Path, alone: bool = False) -> "subprocess.CompletedProcess[str]":
        """Python in that folder, with the files of all wheels, or of baton-client's alone, before all others."""
        return self._run(sys.executable, *words, folder=folder, alone=alone)

    def baton(self, *words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
        """The command `baton`, as it was installed."""
        return self._run(str(self.installed / "bin" / "baton"), *words, folder=folder)

    def _run(self, *command: str, folder: Path, alone: bool = False) -> "subprocess.CompletedProcess[str]":
        environment = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        environment["PYTHONPATH"] = str(self.client_alone if alone else self.installed)
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A release's wheels, from sdists, without a network."""
    folder = tmp_path_factory.mktemp("built")
    client_sdist, client_wheel = build(CLIENT, folder / "client")
    _, http2_wheel = build(HTTP2, folder / "http2")
    sdist, wheel = build(ROOT, folder / "serving")
    offline = (sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-index")
    run(*offline, "--target", str(folder / "alone"), str(client_wheel))
    run(*offline, "--target", str(folder / "installed"), *map(str, (client_wheel, http2_wheel, wheel)))
    return Built(
        sdist=inside(sdist),
        wheel=set(zipfile.ZipFile(wheel).namelist()),
        client_sdist=inside(client_sdist),
        client_wheel=set(zipfile.ZipFile(client_wheel).namelist()),
        requires=requirements(wheel),
        client_requires=requirements(client_wheel),
        client_alone=folder / "alone",
        installed=folder / "installed",
    )


def build(project: Path, folder: Path) -> tuple[Path, Path]:
    """The sdist of a project, and the wheel that is built from it."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder), project=project)
    (sdist,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--quiet", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    run(*pip, "--wheel-dir", str(folder), str(sdist))
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def inside(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def requirements(wheel: Path) -> set[str]:
    """The names of what a wheel requires, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    return {re.split("[<>=!;]", line)[0].split()[-1] for line in lines if re.match("Requires-Dist: [^;]*$", line)}


def run(*command: str, project: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def version() -> str:
    found = re.search('^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    "path",
    [
        "baton/cluster_requests.py",
        "baton/errors.py",
        "baton/py.typed",
        "baton/inference/v1/generate_pb2.py",
        "baton/inference/v1/inference_service_pb2_grpc.py",
        "baton/inference/v1/generate_pb2.pyi",
        "baton/engine/v1/decode_pb2.py",
    ],
)
def test_the_clients_wheel_contains(built: Built, path: str) -> None:
    assert path in built.client_wheel


@pytest.mark.parametrize(
    "path", ["cli/__main__.py", "devtools/trace_viewer/page.html", "services/engines/pytorch/engine.py"]
)
def test_the_wheel_contains(built: Built, path: str) -> None:
    assert path in built.wheel


def test_each_wheel_has_only_its_own_packages(built: Built) -> None:
    assert {path.split("/")[0] for path in built.wheel if ".dist-info/" not in path} == PACKAGES
    assert {path.split("/")[0] for path in built.client_wheel if ".dist-info/" not in path} == {"baton"}


def test_every_proto_has_its_stubs_in_the_clients_wheel_and_sdist(built: Built) -> None:
    protos = {str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto")}
    stubs = {f"{proto.removesuffix('.proto')}_pb2.py" for proto in protos}
    assert stubs
    assert stubs <= built.client_wheel
    assert stubs <= built.client_sdist


def test_the_sdist_has_what_was_written_and_nothing_that_was_generated(built: Built) -> None:
    assert {
        "protos/baton/inference/v1/generate.proto",
        "packaging/client/pyproject.toml",
        "tools/stubs.py",
        "models/demo/model.safetensors",
    } <= built.sdist
    assert not [path for path in built.sdist if "_pb2" in path or "node_modules" in path or path.startswith(".venv")]


def test_the_client_needs_grpcio_and_protobuf_and_nothing_heavier(built: Built) -> None:
    assert built.client_requires == {"grpcio", "protobuf", "googleapis-common-protos"}


def test_a_router_installs_neither_an_engine_nor_the_commands_tables(built: Built) -> None:
    assert "tokenizers" in built.requires
    assert built.requires.isdisjoint({"torch", "transformers", "safetensors", "rich"})


@pytest.mark.parametrize(
    ("module", "words", "missing", "message"),
    [
        (
            "services",
            ["worker.yaml"],
            "torch",
            "engine.kind: pytorch needs torch, from the extra `pytorch`: pip install 'baton-serving[pytorch]'",
        ),
        ("cli", ["workers"], "rich", "this command needs the extra `cli`: pip install 'baton-serving[cli]'"),
    ],
)
def test_a_missing_extra_is_named(
    built: Built, tmp_path: Path, module: str, words: list[str], missing: str, message: str
) -> None:
    engine = f"engine: {{kind: pytorch, model: {ROOT / 'models' / 'demo'}}}"
    (tmp_path / "worker.yaml").write_text(
        f"roles: [prefill, decode]\nlisten: 127.0.0.1:0\n{engine}\nregistry: {{kind: file, folder: {tmp_path}}}\n"
    )
    program = f"from {module}.__main__ import main; main()"
    absent = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['baton', *{words!r}]; {program}"
    done = built.run("-c", absent, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stdout + done.stderr


def test_both_distributions_and_the_library_have_one_version(built: Built) -> None:
    assert f'version = "{version()}"' in (CLIENT / "pyproject.toml").read_text()
    assert f'"baton-client=={version()}"' in (ROOT / "pyproject.toml").read_text()
    done = built.run("-c", "import baton; print(baton.__version__)", folder=ROOT / "docs", alone=True)
    assert done.stdout == f"{version()}\n"


def test_the_client_loads_nothing_of_the_server(built: Built, tmp_path: Path) -> None:
    program = (
        "import sys; from baton import AsyncClient, Client, Retry, Tls; Client().close();"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = built.run("-c", program, folder=tmp_path, alone=True)
    assert done.returncode == 0, done.stderr
    loaded = set(re.findall("'(.*?)'", done.stdout))
    assert "baton" in loaded
    assert loaded.isdisjoint(
        {*PACKAGES, "baton_http2", "torch", "transformers", "numpy", "pydantic", "structlog", "opentelemetry"}
    )


def test_folders_of_a_users_own_break_neither_library_nor_command(built: Built, tmp_path: Path) -> None:
    for name in COMMON_NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a folder of the user')\n")
    library = "from baton import AsyncClient, Client; from baton.inference.v1 import generate_pb2; print('fine')"
    assert built.run("-c", library, folder=tmp_path, alone=True).stdout == "fine\n"
    assert built.baton("--version", folder=tmp_path).stdout == f"baton {version()}\n"
    done = built.baton("generate", "hello", "--address", "127.0.0.1:1", folder=tmp_path)
    assert (done.returncode, "no response from 127.0.0.1:1" in done.stderr) == (1, True), done.stderr
    shadowed = [line for line in built.baton("doctor", folder=tmp_path).stdout.splitlines() if "'import " in line]
    assert shadowed == []


def test_the_doctor_reads_configurations_where_a_user_has_folders_of_these_names(built: Built, tmp_path: Path) -> None:
    for name in COMMON_NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a folder of the user')\n")
    done = built.baton("doctor", "--config", str(ROOT / "deploy" / "compose"), folder=tmp_path)
    assert "a folder of the user" not in done.stdout + done.stderr


def test_it_says_its_version(built: Built, tmp_path: Path) -> None:
    assert built.baton("--version", folder=tmp_path).stdout == f"baton {version()}\n"


@pytest.mark.parametrize("module", ["cli", "router", "services"])
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
    done = built.baton("up", folder=tmp_path)
    assert done.returncode == 2
    assert f"a local cluster needs a checkout of Baton, and {built.installed} has no deploy/config" in done.stderr
