"""The folder of a local cluster, .baton: its lock, its state, its address, its logs."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from client.local.plan import ClusterOptions, Role

DEFAULT_FOLDER = Path(".baton")
LOCK_SECONDS = 1.0


class ProcessState(BaseModel):
    """A process as its supervisor sees it. `pid` is 0 while it waits to be started again; times are Unix times."""

    model_config = ConfigDict(frozen=True)

    name: str
    role: Role
    address: str
    metrics: str = ""
    pid: int = 0
    started_at: float = 0.0
    restarts: int = 0
    last_exit: int | None = None

    @property
    def condition(self) -> Literal["running", "restarting"]:
        """In one word."""
        return "running" if self.pid else "restarting"


class ClusterState(BaseModel):
    """A cluster as its supervisor last wrote it down."""

    model_config = ConfigDict(frozen=True)

    options: ClusterOptions
    supervisor_pid: int
    address: str
    processes: tuple[ProcessState, ...]


class AlreadyRunning(Exception):
    """Another supervisor has the folder."""


class StateFolder:
    """Where a local cluster keeps what outlives a command. Whoever holds the lock is the cluster's supervisor."""

    def __init__(self, path: Path = DEFAULT_FOLDER) -> None:
        self.path = path.resolve()
        self.logs = self.path / "logs"
        self._lock = self.path / "lock"
        self._state = self.path / "state.json"
        self._address = self.path / "address"
        self._pid = self.path / "supervisor.pid"

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Holds the lock, and leaves nothing behind but logs. Raises AlreadyRunning.

        The kernel gives the lock back however the process ends, so that a lock that is held means a live supervisor.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a") as file:
            if not _lock_within(file.fileno(), LOCK_SECONDS):
                raise AlreadyRunning(str(self.path))
            self.clear()
            self._pid.write_text(f"{os.getpid()}\n")
            try:
                yield
            finally:
                self.clear()

    @property
    def has_supervisor(self) -> bool:
        """Whether a live supervisor has this folder."""
        if not self._lock.exists():
            return False
        with self._lock.open("a") as file:
            return not _try_lock(file.fileno(), fcntl.LOCK_SH)

    def supervisor_pid(self) -> int | None:
        """The live supervisor's process id; None if there is none, or if it has only just started."""
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
        """Replaces the state, in one step for whoever reads it."""
        _replace(self._state, state.model_dump_json(indent=2))
        _replace(self._address, state.address)

    def address(self) -> str | None:
        """Where the cluster's router listens, if there is a cluster."""
        with contextlib.suppress(OSError):
            return self._address.read_text().strip() or None
        return None

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self.logs / f"{name}.log"

    def clear(self) -> None:
        """Removes what a running cluster keeps here, but not logs and lock. Only whoever owns the folder may."""
        for file in (self._state, self._address, self._pid):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.path / "etcd", ignore_errors=True)


def _lock_within(file: int, seconds: float) -> bool:
    """Takes the lock. Waits a little, for whoever only looks whether it is taken holds it for a moment."""
    deadline = time.monotonic() + seconds
    while not _try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text + "\n")
    new.replace(path)
