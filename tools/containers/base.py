"""Makes a base image with Python from Debian's packages, for machines that reach no registry of images.

    python -m tools.containers.base [NAME]

As root. It stands where `python:3.12-slim-bookworm` stands in deploy/docker/Dockerfile; Debian 12 has Python 3.11.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.containers.engine import CommandFailed, Engine, NoEngine, find_engine

NAME = "localhost/baton-base:bookworm"
SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "python3-pip", "ca-certificates")
# As in the official images: no lists and archives of packages, no documentation, no translations.
REMOVED = ("var/cache/apt/*", "var/lib/apt/lists/*", "var/log/*", "usr/share/doc/*", "usr/share/man/*")
REMOVED += ("usr/share/info/*", "usr/share/locale/*", "usr/lib/python3*/EXTERNALLY-MANAGED", "usr/lib/**/__pycache__")


def main() -> int:
    """Makes the image named on the command line, unless it is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", default=NAME)
    name: str = parser.parse_args().name
    try:
        ensure(find_engine(), name)
    except (NoEngine, CommandFailed) as failure:
        print(failure, file=sys.stderr)
        return 1
    print(name)
    return 0


def ensure(engine: Engine, name: str) -> None:
    """Makes the image unless it is there. Raises CommandFailed."""
    if not is_there(engine, name):
        make(engine, name)


def is_there(engine: Engine, name: str) -> bool:
    """True if the engine has an image of this name."""
    return bool(engine.run("images", "--quiet", name).strip())


def make(engine: Engine, name: str) -> None:
    """Makes the image in a folder that is removed. Raises CommandFailed."""
    with tempfile.TemporaryDirectory(prefix="baton-base-") as folder:
        root = Path(folder, "root")
        _run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)])
        _strip(root)
        archive = Path(folder, "root.tar")
        _run(["tar", "--create", "--numeric-owner", f"--file={archive}", f"--directory={root}", "."])
        engine.run("import", "--change", 'CMD=["python3"]', str(archive), name)


def _strip(root: Path) -> None:
    for path in [path for pattern in REMOVED for path in root.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (root / "usr/bin/python").symlink_to("python3")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise CommandFailed(f"{command[0]}: {done.stdout.strip()[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
