"""Checks of the generated stubs: that they are there, that they load, and that they are of these protos."""

import importlib
from collections.abc import Iterator
from pathlib import Path

from client.doctor.finding import Finding, broken, warning, well

ROOT = Path(__file__).resolve().parents[2]
GENERATE = "make protos"
SERVICES = "baton.inference.v1.inference_service_pb2_grpc"


def check_stubs() -> Iterator[Finding]:
    """Missing, unloadable or outdated stubs."""
    missing = [proto for proto in _protos() if not _stub(proto).is_file()]
    if missing:
        yield broken(f"{len(missing)} stubs were not generated, the first of them for {_shown(missing[0])}", GENERATE)
        return
    # Also what protobuf and grpc raise where they are older than the stubs: neither has one class for it.
    try:
        importlib.import_module(SERVICES)
    except (ImportError, RuntimeError, TypeError) as error:
        yield broken(f"the generated stubs cannot be loaded: {error}", GENERATE)
        return
    outdated = [proto for proto in _protos() if proto.stat().st_mtime > _stub(proto).stat().st_mtime]
    if outdated:
        yield warning(f"{_shown(outdated[0])} is newer than its stub", GENERATE)
    else:
        yield well("the generated stubs are there, load, and are no older than their protos")


def _protos() -> list[Path]:
    """The protos of a checkout; an installed wheel has none, and its stubs are as old as itself."""
    return sorted((ROOT / "protos").rglob("*.proto"))


def _stub(proto: Path) -> Path:
    return proto.with_name(f"{proto.stem}_pb2.py")


def _shown(proto: Path) -> str:
    return str(proto.relative_to(ROOT))
