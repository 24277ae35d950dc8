"""Checks of the generated stubs: they exist, load, and match the protos."""

import importlib
from collections.abc import Iterator
from pathlib import Path

from devtools.doctor.finding import Finding, broken, warning, well

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
