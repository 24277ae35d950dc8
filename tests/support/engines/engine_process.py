"""A worker's process on an engine of another package, whose log a test reads."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml
from support.cluster.processes import ROOT
from support.eventually import eventually

START_SECONDS = 900.0


@contextmanager
def engine_process(
    folder: Path, engine: Mapping[str, object], lease_seconds: float, metrics_listen: str = "127.0.0.1:0"
) -> Iterator["subprocess.Popen[bytes]"]:
    """A decode worker with `engine`; `folder` has its configuration, its registry and its log."""
    config = {
        "worker_id": "w1",
        "roles": ["decode"],
        "listen": "127.0.0.1:0",
        "metrics_listen": metrics_listen,
        "engine": engine,
        "handoff": {"lease_seconds": lease_seconds},
        "registry": {"kind": "file", "folder": str(folder / "registry")},
        "drain_seconds": 0,
    }
    path = folder / "worker.yaml"
    path.write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "services", str(path)], cwd=ROOT, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def log_of(folder: Path) -> str:
    """The log so far."""
    return (folder / "log").read_text(errors="replace")


async def until_ready(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    """Waits until the worker is ready. Fails with its log if it has ended."""
    await eventually(lambda: process.poll() is not None or "worker ready" in log_of(folder), seconds=START_SECONDS)
    assert process.poll() is None, log_of(folder)[-3000:]
