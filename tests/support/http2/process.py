"""A server on our own HTTP/2 in a process of its own, and what it costs."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server."""

    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """The CPU time of all its threads so far."""
        # clock_getcpuclockid(3), which Python does not have.
        return time.clock_gettime((~self.pid << 3) | 2)

    def descriptors(self) -> int:
        """The number of files that it has open now."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def memory_bytes(self) -> int:
        """The memory that it has now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def server_process(descriptors: int = 0) -> Iterator[ServerProcess]:
    """Runs a server until the context is left; with a limit of file descriptors unless that is 0."""

    def bound() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    paths = os.pathsep.join(str(ROOT / each) for each in ("", "protos", "tests"))
    command = [sys.executable, "-m", "support.http2.server"]
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=bound
    ) as popen:
        assert popen.stdout is not None
        try:
            yield ServerProcess(int(popen.stdout.readline()), popen.pid)
        finally:
            popen.kill()
