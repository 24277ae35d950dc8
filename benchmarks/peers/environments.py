"""Installs the routers of other projects from PyPI, into an environment of their own below one folder.

    python -m benchmarks.peers.environments [--folder .bench-router]

Dynamo's frontend is not among them: for Python 3.11 and later ai-dynamo needs aisimulate, which PyPI has only as a stub
that downloads from elsewhere.
"""

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(".bench-router")
PACKAGES = ("vllm-router==0.1.17", "sglang-router==0.3.2")


def python_of(folder: Path) -> Path:
    """The Python that has vllm-router and sglang-router."""
    return folder / "http" / "bin" / "python"


def install(folder: Path) -> None:
    """Installs what is not there."""
    python = python_of(folder)
    complete = folder / "http" / "complete"
    if complete.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder / "http")], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    complete.touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    install(parser.parse_args().folder)
