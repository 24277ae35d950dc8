"""Which core each process runs on: the router has one for itself, and all others share the rest."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import cpu_nanoseconds

_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Cores:
    """The core of the router that is measured, and those of engines, clients and Envoy."""

    router: frozenset[int]
    others: frozenset[int]

    @property
    def is_pinned(self) -> bool:
        """True if the router has a core for itself."""
        return not self.router & self.others

    def __str__(self) -> str:
        if not self.is_pinned:
            return "router, engines and clients share the only core"
        listed = ", ".join(map(str, sorted(self.others)))
        return f"the router on core {min(self.router)}; engines, clients and Envoy on core {listed}"


def share_cores() -> Cores:
    """Keeps this process, and what it starts, off the router's core, which is the last of those it may use."""
    *others, last = sorted(os.sched_getaffinity(0))
    if not others:
        return Cores(frozenset([last]), frozenset([last]))
    os.sched_setaffinity(0, others)
    return Cores(frozenset([last]), frozenset(others))


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Processes that this thread starts in the context run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def running(
    command: Sequence[str], log: Path, cores: frozenset[int], environment: Mapping[str, str] | None = None
) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """A process, until the context is left; what it prints is appended to `log`."""
    with log.open("ab") as output, on_cores(cores):
        process = subprocess.Popen(  # noqa: ASYNC220  # before anything is measured
            command, stdout=output, stderr=output, env={**os.environ, **(environment or {})}
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process, and waits for its end."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cpu_of_tree(pid: int) -> int:
    """Nanoseconds of CPU of a process and of those that it has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return cpu_nanoseconds(pid) + sum(cpu_of_tree(int(each)) for file in children for each in file.read_text().split())
