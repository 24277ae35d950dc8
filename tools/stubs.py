"""Generates the Python stubs with their types, in baton/, and the descriptor set from protos/.

    python tools/stubs.py

`make protos` runs it, and so does the build of a wheel of baton-client in a fresh
clone (packaging/client/hatch_build.py).
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
DESCRIPTORS = PROTOS / "descriptors.binpb"
# The protos' packages are baton.inference.v1 and its like: their stubs are subpackages of the client library.
LIBRARY = ROOT / "baton"


def main() -> None:
    """Writes the stubs and the descriptor set, and removes the stubs of protos that no longer exist."""
    protos = sources()
    print(f"Generating stubs for {len(protos)} protos", flush=True)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}"]
    command += [f"--python_out={ROOT}", f"--grpc_python_out={ROOT}"]
    command += [f"--mypy_out=quiet:{ROOT}", f"--mypy_grpc_out=quiet:{ROOT}"]
    command += [f"--descriptor_set_out={DESCRIPTORS}", "--include_imports", *map(str, protos)]
    # protoc looks for the type plugin on the PATH; pip installed it beside this Python.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    for package in sorted({folder for proto in protos for folder in _packages(proto)}):
        (package / "__init__.py").write_text(f'"""Generated from protos/{package.relative_to(ROOT)}."""\n')
    for stub in LIBRARY.rglob("*_pb2*.py*"):
        if stub.parent.name != "__pycache__" and not _proto(stub).is_file():
            stub.unlink()


def are_current() -> bool:
    """True if every proto has a stub that is not older than the proto."""
    return all(_is_current(proto) for proto in sources())


def sources() -> list[Path]:
    """All protos."""
    return sorted(PROTOS.rglob("*.proto"))


def stub_of(proto: Path) -> Path:
    """The module with the messages of a proto."""
    return ROOT / proto.relative_to(PROTOS).with_name(f"{proto.stem}_pb2.py")


def _is_current(proto: Path) -> bool:
    stub = stub_of(proto)
    return stub.is_file() and stub.stat().st_mtime >= proto.stat().st_mtime


def _packages(proto: Path) -> Iterator[Path]:
    """The generated packages that a stub is in, below the library itself."""
    folder = stub_of(proto).parent
    while folder != LIBRARY:
        yield folder
        folder = folder.parent


def _proto(stub: Path) -> Path:
    return PROTOS / stub.relative_to(ROOT).with_name(f"{stub.name.partition('_pb2')[0]}.proto")


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    main()
