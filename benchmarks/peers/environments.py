"""Installs routers of other projects from PyPI, and Baton compiled, into environments of their own below one folder.

    python -m benchmarks.peers.environments [--folder .bench-router] [--dynamo-python PYTHON] [--no-compiled]

Baton's environment has the wheels of this checkout as it is, compiled again where it has changed (a minute), and the
packages of this environment. Its interpreter is the distribution's if that has this version of Python, for it is built
with PGO. Without a C compiler or mypyc it is left out.

ai-dynamo needs Python 3.10: for later ones it requires aisimulate, which PyPI has only as a stub that downloads from
elsewhere. Without a Python 3.10 it is left out. It is installed without its dependencies, which follow by name, for it
requires a version of certifi that PyPI may not have yet.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools import compiled

FOLDER = Path(".bench-router")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment: what is installed alone, and what with its dependencies."""

    name: str
    alone: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def python(self, folder: Path) -> Path:
        """Its interpreter."""
        return folder / self.name / "bin" / "python"

    def modules(self, folder: Path) -> Path:
        """The folder of its packages."""
        return next((folder / self.name / "lib").glob("python*/site-packages"))

    def version(self, package: str) -> str:
        """The pinned version of one of its packages."""
        pins = dict(each.split("==") for each in (*self.alone, *self.packages) if "==" in each)
        return pins[package]

    def is_complete(self, folder: Path) -> bool:
        """True if everything was installed."""
        return (folder / self.name / "complete").exists()

    def install(self, folder: Path, interpreter: str) -> None:
        """Installs what is not there. Raises CalledProcessError."""
        if self.is_complete(folder):
            return
        subprocess.run([interpreter, "-m", "venv", str(folder / self.name)], check=True)
        pip = [str(self.python(folder)), "-m", "pip", "install", "--quiet"]
        if self.alone:
            subprocess.run([*pip, "--no-deps", *self.alone], check=True)
        subprocess.run([*pip, *self.packages], check=True)
        (folder / self.name / "complete").touch()


HTTP = Environment("http", packages=("vllm-router==0.1.17", "sglang-router==0.3.2"))
# smg-grpc-proto has the messages of its way to engines by gRPC.
SMG = Environment("smg", packages=("smg==1.13.0", "smg-grpc-proto==0.4.28"))
DYNAMO = Environment(
    "dynamo",
    alone=("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
    packages=(
        "aiohttp<4",
        "certifi",
        "kubernetes<33",
        "msgspec",
        "prometheus-client<1",
        "pydantic<=2.13.5",
        "pyzmq",
        "redis<9",
        "tqdm",
        "transformers>=4.56",
        "typing-extensions",
        "uvloop",
        "zstandard<1",
    ),
)


@dataclass(frozen=True, slots=True)
class CompiledBaton:
    """An environment with Baton's two wheels, one of them compiled, before the packages of this environment."""

    name: str = "baton"

    def python(self, folder: Path) -> Path:
        """Its interpreter."""
        return folder / self.name / "bin" / "python"

    def is_current(self, folder: Path) -> bool:
        """True if it has the checkout's code as it is now."""
        built = folder / self.name / "built"
        return built.is_file() and built.read_text() == checkout_hash()

    def install(self, folder: Path) -> None:
        """Builds and installs what is not there. Raises CalledProcessError."""
        if self.is_current(folder):
            return
        home = folder.absolute() / self.name
        shutil.rmtree(home, ignore_errors=True)
        # The version is the same, so that modules compiled for one interpreter run on the other.
        subprocess.run([distribution_python() or sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        packages = home / "lib" / f"python{_version()}" / "site-packages"
        with tempfile.TemporaryDirectory() as wheels:
            compiled.install(Path(wheels), packages)
        # A path only: the .pth file of this checkout's editable installation is not read.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (home / "built").write_text(checkout_hash())


COMPILED = CompiledBaton()


def distribution_python() -> str | None:
    """The distribution's interpreter of this version of Python."""
    return next(filter(_runs, filter(os.path.exists, [f"/usr/bin/python{_version()}"])), None)


def compiler_problem() -> str:
    """The reason that nothing can be compiled here; empty if it can."""
    if not shutil.which((os.environ.get("CC") or "cc").split()[0]):
        return "no C compiler was found"
    if not all(map(importlib.util.find_spec, ("mypyc", "setuptools", "hatchling"))):
        return "mypyc, setuptools and hatchling are not installed"
    return ""


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def checkout_hash() -> str:
    """Of what the wheels are built from."""
    found = hashlib.sha256()
    for package in (*compiled.packages(), "baton", "packaging"):
        for path in sorted((compiled.ROOT / package).rglob("*.py")):
            found.update(str(path).encode() + path.read_bytes())
    found.update((compiled.ROOT / "pyproject.toml").read_bytes())
    return found.hexdigest()


def python_3_10() -> str | None:
    """An interpreter that ai-dynamo can be installed for: of the PATH, or of pyenv."""
    return next(filter(_runs, _found()), None)


def _found() -> Iterator[str]:
    if on_path := shutil.which("python3.10"):
        yield on_path
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from (str(found) for found in sorted(root.glob("versions/3.10.*/bin/python3.10"), reverse=True))


def _runs(interpreter: str) -> bool:
    # pyenv has commands on the PATH for versions that are not chosen.
    return subprocess.run([interpreter, "--version"], capture_output=True, check=False).returncode == 0


def install_compiled(folder: Path) -> None:
    """Compiles Baton if that can be done, and says so if not."""
    if problem := compiler_problem():
        print(f"The compiled Baton is left out: {problem}")
        return
    try:
        COMPILED.install(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"The compiled Baton is left out: {error}")


def install_others(folder: Path, dynamo_python: str | None) -> None:
    """Installs the other projects' routers that can be, and says what cannot."""
    HTTP.install(folder, sys.executable)
    SMG.install(folder, sys.executable)
    if DYNAMO.is_complete(folder):
        return
    if not dynamo_python:
        print("Dynamo is left out: ai-dynamo needs Python 3.10, which was not found; see --dynamo-python")
        return
    try:
        DYNAMO.install(folder, dynamo_python)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Dynamo is left out: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--dynamo-python", default=python_3_10(), help="a Python 3.10 (found: %(default)s)")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="compile Baton")
    arguments = parser.parse_args()
    if arguments.compiled:
        install_compiled(arguments.folder)
    install_others(arguments.folder, arguments.dynamo_python)
