"""Creates the virtual environment: `python3 tools/install.py .venv`, with any Python that Baton supports.

Uses only the standard library, because it runs before anything is installed.
"""

import argparse
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
    """The environment could not be created; the message says why."""


def main() -> int:
    """Creates or updates the environment named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("environment", nargs="?", type=Path, default=Path(".venv"), metavar="FOLDER")
    environment: Path = parser.parse_args().environment
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
    """Installs the project in editable mode, at the versions of constraints.txt."""
    started = time.monotonic()
    python = environment / "bin" / "python"
    create(environment)
    log = environment / "install.log"
    log.write_text("")
    # The build tools first, pinned too: an isolated build would fetch the newest versions.
    run_pip(python, log, BUILD_REQUIREMENTS)
    # All distributions together: the last requires the others, which need not be in any index.
    projects = [str(ROOT / "packaging" / "client"), str(ROOT / "packaging" / "http2"), f"{ROOT}[dev]"]
    run_pip(python, log, ["--no-build-isolation", *(word for each in projects for word in ("--editable", each))])
    clear_line()
    print(f"Installed into {environment} in {time.monotonic() - started:.0f} s", flush=True)


def create(environment: Path) -> None:
    """Creates the environment, or completes one whose creation was interrupted."""
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
    """Runs `pip install`, shows its progress, and writes its output to the log."""
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
    """Shows pip's progress: on one changing line in a terminal, otherwise only now and then."""
    words = line.split()
    if len(words) < 2 or words[0] not in {"Collecting", "Downloading", "Installing", "Building"}:
        return
    if sys.stdout.isatty():
        what = " ".join(words[:2]) if words[0] != "Installing" else "Installing packages"
        print(f"\r\033[K  {what[:76]}", end="", flush=True)
    elif words[0] == "Installing":
        print("Installing packages", flush=True)


def clear_line() -> None:
    """Clears the line that `show` wrote."""
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
