"""The wheel of baton-http2, in an environment that has it and what it declares, and nothing else."""

import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "packaging" / "http2"
README = (PROJECT / "README.md").read_text()


def run(*command: object, folder: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release's wheel: from the sdist, without a network."""
    folder = tmp_path_factory.mktemp("http2")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder, folder=PROJECT)
    (sdist,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--quiet", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    run(*pip, "--wheel-dir", folder, sdist, folder=folder)
    (built,) = folder.glob("*.whl")
    return built


def required(lines: Iterable[str]) -> set[str]:
    """The names of requirements that hold here, without those of extras."""
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name) for each in parsed if not each.marker or each.marker.evaluate({"extra": ""})}


def declared(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return required(line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: "))


def closure(names: set[str]) -> set[str]:
    """Distributions, with all that they require in turn."""
    found: set[str] = set()
    while left := names - found:
        found |= left
        names = found.union(*(required(metadata.requires(name) or ()) for name in left))
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with links to what it requires."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, folder=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in closure(declared(wheel)):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return python


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"baton_http2"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "baton_http2").rglob("*.py")}
    assert names == sources | {"baton_http2/py.typed"}


def test_it_requires_nothing_of_baton(wheel: Path) -> None:
    assert not [name for name in closure(declared(wheel)) if name.startswith("baton")]


def test_every_module_can_be_imported_without_the_rest_of_the_repository(wheel: Path, python: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names]
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    run(python, "-c", program, *modules, folder=python.parent)


def test_the_readmes_server_answers_grpcios_client(python: Path, tmp_path: Path) -> None:
    example = re.search("```python\n(import asyncio.*?)```", README, re.S)
    assert example is not None
    (tmp_path / "example.py").write_text(example[1])
    assert run(python, "example.py", folder=tmp_path) == "b'hello world'\n"


def test_the_readmes_client_calls_a_server(python: Path, tmp_path: Path) -> None:
    call = re.search("```python\n(async with open_call.*?)```", README, re.S)
    assert call is not None
    body = "".join(f"    {line}\n" for line in call[1].splitlines())
    program = f"""
import asyncio
import grpc
from baton_http2.client.dialing import ServerAddress, open_call

async def chat(requests, context):
    async for request in requests:
        yield request
        return

async def main():
    server = grpc.aio.server()
    methods = {{"Chat": grpc.stream_stream_rpc_method_handler(chat)}}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("example.Greeter", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
{body}    print(status.code().name)
    await asyncio.wait_for(server.stop(0), 20)

asyncio.run(main())
"""
    (tmp_path / "call.py").write_text(program.replace('"127.0.0.1:50051"', 'f"127.0.0.1:{port}"'))
    assert run(python, "call.py", folder=tmp_path) == "b'hello'\nOK\n"


def test_baton_serving_requires_this_version() -> None:
    version = re.search('^version = "(.*)"$', (PROJECT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert f'"baton-http2=={version[1]}"' in (ROOT / "pyproject.toml").read_text()
