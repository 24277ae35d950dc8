"""Makes the virtual environment: `python3 tools/install.py .venv`, on any Python that Baton runs on.

Uses nothing but the standard library, because it runs before anything is installed.
"""

import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)
LOG_LINES_SHOWN = 40
BUILD_REQUIREMENTS = ["hatchling", "editables"]


class InstallFailed(Exception):
    """There is no usable environment; the message says why."""


def main() -> int:
    """Creates the environment named on the command line, or brings it up to date."""
    environment = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv")
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"Baton needs Python 3.10 or newer; {sys.executable} is {found}.", file=sys.stderr)
        print("Try: make PYTHON=python3.12", file=sys.stderr)
        return 1
    try:
        install(environment)
    except InstallFailed as failure:
        clear_line()
        print(failure, file=sys.stderr)
        return 1
    return 0


def install(environment: Path) -> None:
    """Fills `environment` with the project in editable mode, at the versions of constraints.txt."""
    started = time.monotonic()
    python = environment / "bin" / "python"
    create(environment)
    log = environment / "install.log"
    log.write_text("")
    # The build's own tools first and pinned too: an isolated build would fetch whatever is newest.
    run_pip(python, log, BUILD_REQUIREMENTS)
    run_pip(python, log, ["--no-build-isolation", "--editable", f"{ROOT}[dev]"])
    clear_line()
    print(f"Installed into {environment} in {time.monotonic() - started:.0f} s", flush=True)


def create(environment: Path) -> None:
    """Creates the environment, or mends one whose creation was interrupted."""
    if (environment / "bin" / "pip").exists():
        return
    print(f"Creating {environment}", flush=True)
    try:
        venv.create(environment, with_pip=True)
    except subprocess.CalledProcessError as error:
        raise InstallFailed(
            f"{sys.executable} cannot create virtual environments (on Debian and Ubuntu: apt install python3-venv)"
        ) from error


def run_pip(python: Path, log: Path, arguments: list[str]) -> None:
    """Runs `pip install`, shows which package it is at, and keeps everything it says in the log."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--constraint", str(ROOT / "constraints.txt"), *arguments]
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    with log.open("a") as file, subprocess.Popen(command, stdout=pipe, stderr=merged, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            file.write(line)
            show(line)
    if pip.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-LOG_LINES_SHOWN:])
        raise InstallFailed(f"{tail}\nThe whole log: {log}")


def show(line: str) -> None:
    """Says what pip is doing: on one line that changes in a terminal, sparsely elsewhere."""
    words = line.split()
    if len(words) < 2 or words[0] not in {"Collecting", "Downloading", "Installing", "Building"}:
        return
    if sys.stdout.isatty():
        what = " ".join(words[:2]) if words[0] != "Installing" else "Installing packages"
        print(f"\r\033[K  {what[:76]}", end="", flush=True)
    elif words[0] == "Installing":
        print("Installing packages", flush=True)


def clear_line() -> None:
    """Removes what `show` left."""
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
