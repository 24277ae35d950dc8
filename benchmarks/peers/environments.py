"""Installs the routers of other projects from PyPI, into environments of their own below one folder.

    python -m benchmarks.peers.environments [--folder .bench-router] [--dynamo-python PYTHON]

ai-dynamo needs Python 3.10: for later ones it requires aisimulate, which PyPI has only as a stub that downloads from
elsewhere. Without a Python 3.10 it is left out. It is installed without its dependencies, which follow by name, for it
requires a version of certifi that PyPI may not have yet.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

    def is_complete(self, folder: Path) -> bool:
        """Whether everything was installed."""
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


def install(folder: Path, dynamo_python: str | None) -> None:
    """Installs everything that can be, and says what cannot."""
    HTTP.install(folder, sys.executable)
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
    arguments = parser.parse_args()
    install(arguments.folder, arguments.dynamo_python)
