"""The folder of a local cluster, .baton: its lock, its state, its address, and its logs, read from the end."""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import struct
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cli.local.plan import ClusterOptions, ProcessPlan, Role

DEFAULT_FOLDER = Path(".baton")
# A supervisor that holds the lock for this long is running, and not about to exit.
STILL_SECONDS = 1.0
# For a process that holds the lock while it starts a cluster or cleans up: only a very busy machine needs this long.
LOCK_SECONDS = 60.0
POLL_SECONDS = 0.01


class ProcessState(BaseModel):
    """A process as its supervisor sees it. `pid` is 0 while it waits for a restart; times are Unix times."""

    model_config = ConfigDict(frozen=True)

    name: str
    role: Role
    address: str
    metrics: str = ""
    otlp: str = ""
    openai: str = ""
    pid: int = 0
    started_at: float = 0.0
    restarts: int = 0
    last_exit: int | None = None

    @classmethod
    def of(cls, plan: ProcessPlan) -> "ProcessState":
        """The state of a process before its first start."""
        return cls(
            name=plan.name,
            role=plan.role,
            address=plan.address,
            metrics=plan.metrics,
            otlp=plan.otlp,
            openai=plan.openai,
        )

    @property
    def condition(self) -> Literal["running", "restarting"]:
        """The state in one word."""
        return "running" if self.pid else "restarting"


class ClusterState(BaseModel):
    """A cluster's state, as its supervisor last wrote it."""

    model_config = ConfigDict(frozen=True)

    options: ClusterOptions
    supervisor_pid: int
    address: str
    processes: tuple[ProcessState, ...]


class AlreadyRunning(Exception):
    """Another supervisor owns the folder."""


class StateFolder:
    """The folder of a local cluster's files. The process that holds the lock is the cluster's supervisor."""

    def __init__(self, path: Path = DEFAULT_FOLDER) -> None:
        self.path = path.resolve()
        self.logs = self.path / "logs"
        self._lock = self.path / "lock"
        self._state = self.path / "state.json"
        self._address = self.path / "address"
        self._pid = self.path / "supervisor.pid"

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Makes this process the supervisor: holds the lock, and leaves only logs. Raises AlreadyRunning.

        The kernel releases the lock however the process ends, so a lock that is held means a live process.
        """
        with self.cleaned():
            self._pid.write_text(f"{os.getpid()}\n")
            yield

    @contextlib.contextmanager
    def cleaned(self) -> Iterator[None]:
        """Holds the lock, and removes everything but logs at the beginning and at the end. Raises AlreadyRunning."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a") as file:
            self._wait_for_lock(file.fileno())
            self.clear()
            try:
                yield
            finally:
                self.clear()

    def _wait_for_lock(self, file: int) -> None:
        """Takes the lock. Gives up on a supervisor that keeps it; a process that only cleans up releases it."""
        started = changed = time.monotonic()
        owner = self._owner()
        while not _try_lock(file):
            now, seen = time.monotonic(), self._owner()
            if seen != owner:
                owner, changed = seen, now
            if (owner and now - changed > STILL_SECONDS) or now - started > LOCK_SECONDS:
                raise AlreadyRunning(str(self.path))
            time.sleep(POLL_SECONDS)

    def _owner(self) -> str:
        """The process id that the last supervisor wrote; empty if it cleaned up, or if there was none."""
        with contextlib.suppress(OSError):
            return self._pid.read_text()
        return ""

    @property
    def has_supervisor(self) -> bool:
        """True if a live process holds the lock. Looking takes no lock, so it never delays a supervisor."""
        try:
            with self._lock.open("rb") as file:
                return _is_locked(file.fileno())
        except FileNotFoundError:
            return False

    def supervisor_pid(self) -> int | None:
        """The live supervisor's process id; None if there is none, or if it has not written its id yet."""
        if not self.has_supervisor:
            return None
        with contextlib.suppress(OSError, ValueError):
            return int(self._pid.read_text())
        return None

    def read(self) -> ClusterState | None:
        """The live supervisor's state; None if there is none, or if it has not written any yet."""
        if not self.has_supervisor:
            return None
        with contextlib.suppress(OSError, ValidationError):
            return ClusterState.model_validate_json(self._state.read_text())
        return None

    def write(self, state: ClusterState) -> None:
        """Replaces the state atomically."""
        _replace(self._state, state.model_dump_json(indent=2))
        _replace(self._address, state.address)

    def address(self) -> str | None:
        """The address of the cluster's router; None without a cluster."""
        with contextlib.suppress(OSError):
            return self._address.read_text().strip() or None
        return None

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.logs / f"{name}.log"

    def clear(self) -> None:
        """Removes a cluster's files except logs and lock. Call it only while holding the lock."""
        for file in (self._state, self._address, self._pid):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.path / "etcd", ignore_errors=True)


def _try_lock(file: int) -> bool:
    """Takes an exclusive lock of the open file description, not of the process: see fcntl(2)."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _is_locked(file: int) -> bool:
    """True if another open file has the lock."""
    found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    kind: int = struct.unpack_from("h", found)[0]
    return kind != fcntl.F_UNLCK


def _flock(kind: int) -> bytes:
    """`struct flock` for the whole file: type, whence, start, length, process id."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text + "\n")
    new.replace(path)


FOLLOW_SECONDS = 0.2


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines; empty if the file does not exist."""
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except FileNotFoundError:
        return []


async def follow(paths: Mapping[str, Path], sizes: Mapping[str, int]) -> AsyncGenerator[tuple[str, str], None]:
    """Yields (name, line) for every line after the first `sizes` bytes, forever. Starts over if a log is truncated."""
    read = dict(sizes)
    while True:
        for name, path in paths.items():
            for line in _complete_lines(path, read[name]):
                read[name] += len(line)
                yield name, line.decode(errors="replace").rstrip("\n")
            if _size(path) < read[name]:
                read[name] = 0
        await asyncio.sleep(FOLLOW_SECONDS)


def _complete_lines(path: Path, start: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return [line for line in file if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
