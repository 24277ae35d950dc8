"""Checks of the installation: Python, versions that clash, other packages with our names.

Checks of the generated stubs: they exist, load, and match the protos.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from devtools.doctor.finding import Finding, broken, warning, well

DISTRIBUTION = "baton-serving"
OUR_DISTRIBUTIONS = (DISTRIBUTION, "baton-client", "baton-http2")
OUR_NAMES = (
    "router",
    "services",
    "discovery",
    "grammars",
    "media",
    "engine_protocol",
    "rpc",
    "cli",
    "devtools",
    "baton_http2",
    "baton",
)
OLDEST_PYTHON = (3, 10)
NEWEST_TESTED_PYTHON = (3, 13)
REINSTALL = "make install (or: pip install -c constraints.txt -e packaging/client -e packaging/http2 -e .[dev])"


def check_python() -> Iterator[Finding]:
    """Checks that Baton supports this Python."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        yield broken(f"Python {version} is too old; Baton requires 3.10 or newer", "make PYTHON=python3.12")
    elif sys.version_info[:2] > NEWEST_TESTED_PYTHON:
        yield warning(f"Python {version} is newer than the tested versions (3.10 to 3.13)", "make PYTHON=python3.13")
    else:
        yield well(f"Python {version}")


def check_versions() -> Iterator[Finding]:
    """Checks that the requirements of all installed packages are met."""
    clashes = list(_clashes())
    yield from clashes
    if not clashes:
        yield well(f"{len(list(metadata.distributions()))} installed packages agree on their versions")


def check_names() -> Iterator[Finding]:
    """Checks that `import router` and the like find our packages, and no other distribution's."""
    owners = metadata.packages_distributions()
    strangers = [
        (name, owner) for name in OUR_NAMES for owner in owners.get(name, []) if owner not in OUR_DISTRIBUTIONS
    ]
    for name, owner in strangers:
        yield broken(
            f"the package {owner} installed a module named '{name}', which Baton has too", f"pip uninstall {owner}"
        )
    shadowed = [(name, place) for name in OUR_NAMES if (place := _elsewhere(name)) is not None]
    for name, place in shadowed:
        yield broken(
            f"'import {name}' finds {place} instead of Baton's", "run from another folder, or unset PYTHONPATH"
        )
    if not strangers and not shadowed:
        yield well(f"the names {', '.join(OUR_NAMES)} are Baton's alone")


def _clashes() -> Iterator[Finding]:
    """Unmet requirements of Baton, direct or not, are broken; those of other packages are warnings."""
    needed = _needed()
    for distribution in metadata.distributions():
        ours = canonicalize_name(distribution.name) in needed
        for requirement in _requirements(distribution):
            if (found := _mismatch(requirement)) is not None:
                sentence = f"{distribution.name} needs {requirement.name}{requirement.specifier}, {found}"
                yield (broken(sentence, REINSTALL) if ours else warning(sentence, f"remove {distribution.name}"))


def _needed() -> set[str]:
    """The names of Baton and of its installed direct and indirect requirements."""
    seen: set[str] = set()
    unseen = [DISTRIBUTION]
    while unseen:
        name = canonicalize_name(unseen.pop())
        if name not in seen:
            with contextlib.suppress(metadata.PackageNotFoundError):
                unseen += [each.name for each in _requirements(metadata.distribution(name))]
            seen.add(name)
    return seen


def _requirements(distribution: metadata.Distribution) -> Iterator[Requirement]:
    """The requirements that apply to this machine, without extras."""
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _mismatch(requirement: Requirement) -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "which is not installed"
    return None if requirement.specifier.contains(version, prereleases=True) else f"and {version} is installed"


def _elsewhere(name: str) -> Path | None:
    """The location of a module of this name, if it is not beside this package."""
    ours = Path(__file__).resolve().parents[2]
    spec = importlib.util.find_spec(name)
    places = [Path(place).resolve() for place in (spec.submodule_search_locations or [])] if spec is not None else []
    strange = [place for place in places if place != ours / name]
    return strange[0] if strange else None


ROOT = Path(__file__).resolve().parents[2]
GENERATE = "make protos"
SERVICES = "baton.inference.v1.inference_service_pb2_grpc"


def check_stubs() -> Iterator[Finding]:
    """Finds stubs that are missing, outdated, or cannot be loaded."""
    missing = [proto for proto in _protos() if not _stub(proto).is_file()]
    if missing:
        yield broken(f"{len(missing)} stubs are missing, the first for {_shown(missing[0])}", GENERATE)
        return
    # protobuf and grpc raise these too if they are older than the stubs; neither has a class for that.
    try:
        importlib.import_module(SERVICES)
    except (ImportError, RuntimeError, TypeError) as error:
        yield broken(f"the generated stubs cannot be loaded: {error}", GENERATE)
        return
    outdated = [proto for proto in _protos() if proto.stat().st_mtime > _stub(proto).stat().st_mtime]
    if outdated:
        yield warning(f"{_shown(outdated[0])} is newer than its stub", GENERATE)
    else:
        yield well("the generated stubs load and are up to date")


def _protos() -> list[Path]:
    """The protos of a checkout; empty in an installed wheel, whose stubs are always up to date."""
    return sorted((ROOT / "protos").rglob("*.proto"))


def _stub(proto: Path) -> Path:
    return ROOT / proto.relative_to(ROOT / "protos").with_name(f"{proto.stem}_pb2.py")


def _shown(proto: Path) -> str:
    return str(proto.relative_to(ROOT))
