"""Starts Baton's processes, on free loopback ports, and ends them by pid."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.cluster.forked import ForkedProcess
from support.cluster.progress import Progress
from support.cluster.server_kind import OVERRIDES
from support.engines.device import DEVICE
from support.freezing import freeze
from support.servers.etcd import free_port

ROOT = Path(__file__).resolve().parents[3]

StartProcess = Callable[[str, str, Sequence[str], Path], contextlib.AbstractContextManager["Process"]]
"""`process` or `forked`."""


@dataclass(frozen=True, slots=True)
class Process:
    """A running process of Baton: where it listens, and its log."""

    address: str
    popen: "subprocess.Popen[bytes] | ForkedProcess"
    log: Path

    def kill(self) -> None:
        """kill -9."""
        self.popen.kill()
        self.popen.wait(10)

    def terminate(self, seconds: float = 20) -> int:
        """SIGTERM; the exit code."""
        self.popen.terminate()
        return self.popen.wait(seconds)

    def pause(self) -> None:
        freeze(self.popen.pid)

    def resume(self) -> None:
        os.kill(self.popen.pid, signal.SIGCONT)

    def wait_until_serving(self) -> None:
        """Waits until the process reports SERVING; fails with its log if it ends or makes no progress."""
        progress = Progress(self.popen.pid)
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not progress.has_stalled() and self.popen.poll() is None:
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(0.05)
        raise AssertionError(f"{self.address} is not serving; its log:\n{self.log.read_text()[-4000:]}")


@contextlib.contextmanager
def process(module: str, config: str, overrides: Sequence[str], log: Path) -> Iterator[Process]:
    """`python -m MODULE deploy/config/CONFIG listen=... OVERRIDES`, until the context is left."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", module, *_arguments(config, address, overrides)]
    with log.open("wb") as output:
        popen = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    with _ended(popen):
        yield Process(address, popen, log)


@contextlib.contextmanager
def forked(module: str, config: str, overrides: Sequence[str], log: Path) -> Iterator[Process]:
    """The same for a process whose start is not tested: it is forked, which takes 1.5 s of a processor less."""
    address = f"127.0.0.1:{free_port()}"
    started = ForkedProcess(module, _arguments(config, address, overrides), os.environ, log)
    with _ended(started):
        yield Process(address, started, log)


@contextlib.contextmanager
def keeper(config: str, overrides: Sequence[str], log: Path) -> Iterator[Process]:
    """`python -m services.keeper` with a worker on PyTorch, whose start is not tested; the worker has a `worker_id`.

    On a processor both are forked, which takes 5 to 10 s of it less.
    """
    start, module = (forked, "support.cluster.forked_keeper") if DEVICE == "cpu" else (process, "services.keeper")
    with start(module, config, overrides, log) as started:
        yield started


def _arguments(config: str, address: str, overrides: Sequence[str]) -> list[str]:
    return [str(ROOT / "deploy/config" / config), f"listen={address}", *OVERRIDES, *overrides]


@contextlib.contextmanager
def _ended(started: "subprocess.Popen[bytes] | ForkedProcess") -> Iterator[None]:
    """Ends the process with the context, if it still runs."""
    try:
        yield
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGCONT)
            started.kill()
            started.wait(10)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes of the ranks above 0 of an engine in process `pid`."""
    return [each for each in psutil.Process(pid).children() if "spawn_main" in " ".join(each.cmdline())]
