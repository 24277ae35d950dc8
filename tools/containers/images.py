"""Builds images of deploy/docker/Dockerfile: `python -m tools.containers.images [TARGET...]`, or `make images`.

`--base` and `--torch-index` are the Dockerfile's build arguments. `--host-pip` mounts this machine's pip configuration
into the build, with the certificates and folders that it names: nothing of it is in the Dockerfile or the image.
"""

import argparse
import configparser
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tools.containers import base
from tools.containers.engine import CommandFailed, Engine, NoEngine, find_engine

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("router", "cpu", "cuda", "trtllm")
PULL_SECONDS = 3600.0  # an image of 15 GB
# Of the machine, and of root, who builds.
PIP_FILES = (
    Path("/etc/pip.conf"),
    Path("/etc/xdg/pip/pip.conf"),
    Path("/root/.config/pip/pip.conf"),
    Path("/root/.pip/pip.conf"),
)


@dataclass(frozen=True)
class Choices:
    """The Dockerfile's build arguments, None for its own; and whether pip is configured as on this machine."""

    base: str | None = None
    torch_index: str | None = None
    uses_host_pip: bool = False
    is_compiled: bool = True


def main() -> int:
    """Builds the targets named on the command line, and prints the size of each."""
    arguments = _parser().parse_args()
    choices = Choices(arguments.base, arguments.torch_index, arguments.host_pip, not arguments.pure)
    try:
        engine = find_engine()
        if choices.base == "debian":
            base.ensure(engine, base.NAME)
            choices = replace(choices, base=base.NAME)
        for target in arguments.targets:
            started = time.monotonic()
            build(engine, target, choices)
            image = f"baton:{target}"
            print(f"{image}: {size_mb(engine, image)} MB, in {time.monotonic() - started:.0f} s", flush=True)
    except (NoEngine, CommandFailed) as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def build(engine: Engine, target: str, choices: Choices, context: Path = ROOT, image: str = "") -> None:
    """Builds a target from a checkout, as `baton:TARGET` unless it is named. Raises CommandFailed."""
    if target not in TARGETS:
        raise CommandFailed(f"unknown target {target!r}; expected one of {', '.join(TARGETS)}")
    if target == "trtllm":
        _require_base(engine, _default("TRTLLM_IMAGE", context))
    command = ["build", "--file", str(context / "deploy/docker/Dockerfile"), "--target", target]
    engine.show(*command, "--tag", image or f"baton:{target}", *_options(engine, choices), str(context))


def size_mb(engine: Engine, image: str) -> int:
    """Megabytes (10^6 bytes) of an image with its base."""
    return int(engine.run("image", "inspect", "--format", "{{.Size}}", image)) // 10**6


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=["router", "cpu"], metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument(
        "--base",
        metavar="IMAGE",
        help="with Python, instead of the official one; `debian` makes one from Debian's packages",
    )
    parser.add_argument("--torch-index", metavar="URL", help="of a torch without CUDA; '' for pip's own indexes")
    parser.add_argument("--host-pip", action="store_true", help="use this machine's pip configuration (podman only)")
    parser.add_argument("--pure", action="store_true", help="compile no module of the router")
    return parser


def _options(engine: Engine, choices: Choices) -> list[str]:
    values = {"PYTHON_IMAGE": choices.base, "TORCH_INDEX": choices.torch_index, "REVISION": _revision()}
    values["COMPILED"] = "1" if choices.is_compiled else ""
    given = {name: value for name, value in values.items() if value is not None}
    options = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
    if engine.is_podman:
        # The format that has health checks; and intermediate images are what makes a second build fast.
        options += ["--format", "docker", "--layers", "--quiet"]
    if choices.uses_host_pip:
        if not engine.is_podman:
            raise CommandFailed("docker mounts nothing into a build: --host-pip needs podman")
        options += ["--network", "host"]
        options += [word for path in pip_paths() for word in ("--volume", f"{path}:{path}:ro")]
    return options


def pip_paths() -> list[Path]:
    """pip's configuration on this machine, and every file and folder on this machine that it names."""
    found = {path for path in PIP_FILES if path.is_file()}
    for path in list(found):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(path)
        words = [word for section in parser.values() for value in section.values() for word in value.split()]
        found |= {Path(word.removeprefix("file://")) for word in words if word.startswith(("/", "file:///"))}
    # Certificates are links to other files of their folder, and an index's files lie beside it.
    mounted = {path.parent if path.suffix == ".crt" or path.name == "simple" else path for path in found}
    return sorted(path for path in mounted if path.exists())


def _require_base(engine: Engine, image: str) -> None:
    """Pulls the image that a target is built on, unless it is here. Raises CommandFailed that says so."""
    try:
        engine.run("image", "inspect", image)
    except CommandFailed:
        try:
            engine.run("pull", image, seconds=PULL_SECONDS)
        except CommandFailed as failure:
            raise CommandFailed(f"trtllm is built on {image}, which cannot be pulled here: {failure}") from None


def _default(argument: str, context: Path) -> str:
    """The default of one of the Dockerfile's build arguments."""
    (line,) = [
        each
        for each in (context / "deploy/docker/Dockerfile").read_text().splitlines()
        if each.startswith(f"ARG {argument}=")
    ]
    return line.partition("=")[2]


def _revision() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    sys.exit(main())
