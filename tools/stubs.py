"""Generates what protos/ stand for, beside them: the Python stubs, their types, and the descriptor set.

    python tools/stubs.py

For `make protos`, and for wheels that are built where nobody has run it (tools/build_hook.py).
"""

import os
import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).resolve().parents[1] / "protos"
DESCRIPTORS = PROTOS / "descriptors.binpb"


def main() -> None:
    """Writes all of it, and removes the stubs of protos that are gone."""
    protos = sources()
    print(f"Generating stubs for {len(protos)} protos", flush=True)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}"]
    command += [f"--python_out={PROTOS}", f"--grpc_python_out={PROTOS}"]
    command += [f"--mypy_out=quiet:{PROTOS}", f"--mypy_grpc_out=quiet:{PROTOS}"]
    command += [f"--descriptor_set_out={DESCRIPTORS}", "--include_imports", *map(str, protos)]
    # protoc looks for the plugin that writes types on the PATH; pip has put it beside this Python.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    for stub in PROTOS.rglob("*_pb2*.py*"):
        if stub.parent.name != "__pycache__" and not _proto(stub).is_file():
            stub.unlink()


def are_current() -> bool:
    """Whether every proto has stubs that are not older than it."""
    return all(_is_current(proto) for proto in sources())


def sources() -> list[Path]:
    """All protos."""
    return sorted(PROTOS.rglob("*.proto"))


def _is_current(proto: Path) -> bool:
    stub = proto.with_name(f"{proto.stem}_pb2.py")
    return stub.is_file() and stub.stat().st_mtime >= proto.stat().st_mtime


def _proto(stub: Path) -> Path:
    return stub.with_name(f"{stub.name.partition('_pb2')[0]}.proto")


if __name__ == "__main__":
    main()
