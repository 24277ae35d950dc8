"""The workers of one host that share memory: which of them have theirs now, and which is to give it back.

Each has a file in the group's folder, which it alone writes and locks for as long as it lives: the kernel frees the
lock of a process that dies. Nothing is decided by a process for another: each reads all records, and knows its part.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import sleep

from baton.errors import ConfigError
from runtime.clock import monotonic
from services.keeper.client import KeeperClient

SLEEP_GROUP = "sleep_group"
_LOCK, _SUFFIX = "lock", ".member"
# To join, for which a process waits while others change the group.
_JOIN_SECONDS, _RETRY_SECONDS = 5.0, 0.01
# A record is written by one call, so that a process that is killed leaves the one before it, or this one.
_RECORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of a group. Times are those of the host's monotonic clock."""

    worker_id: str
    num_bytes: int  # what it takes while it is awake
    group_bytes: int  # what all of them may take together
    is_awake: bool = False  # also while it wakes, and until it has given its memory back
    is_busy: bool = False  # it has requests, or holds KV
    awake_since: float = 0.0
    used_at: float = 0.0
    wants_since: float | None = None  # it sleeps, and has had a request since then
    resume_seconds: float = 0.0  # in which its engine has taken the memory last

    @property
    def turn(self) -> tuple[float, str]:
        """The order in which those that want memory get it."""
        return self.wants_since or 0.0, self.worker_id


def may_wake(own: Member, others: Sequence[Member]) -> bool:
    """True if it is the first of those that want memory, and there is room for it."""
    first = min((each.turn for each in others if _wants(each)), default=own.turn)
    return _wants(own) and own.turn <= first and own.num_bytes <= _free(own, others)


def has_to_sleep(own: Member, others: Sequence[Member], least_awake_since: float) -> bool:
    """True if another one wants memory that this one is the next to give back.

    Those without requests come before those with some, of which none is asked that is awake since `least_awake_since`
    or later; and the least recently used comes first. None is asked if all of them together could not make room.
    """
    wanting = min((each for each in others if _wants(each)), key=lambda each: each.turn, default=None)
    if wanting is None or not own.is_awake:
        return False
    missing = wanting.num_bytes - _free(own, others)
    able = [
        each
        for each in (own, *others)
        if each.is_awake and not (each.is_busy and each.awake_since >= least_awake_since)
    ]
    if missing > sum(each.num_bytes for each in able):
        return False
    for each in sorted(able, key=lambda one: (one.is_busy, one.used_at, one.worker_id)):
        if missing <= 0:
            return False
        if each is own:
            return True
        missing -= each.num_bytes
    return False


def _wants(member: Member) -> bool:
    return member.wants_since is not None and not member.is_awake


def _free(own: Member, others: Sequence[Member]) -> int:
    return own.group_bytes - sum(each.num_bytes for each in (own, *others) if each.is_awake)


class Membership:
    """A worker's place in its group; a context manager, which leaves the group at the end."""

    def __init__(self, folder: Path, file: int) -> None:
        self._folder, self._file = folder, file

    @classmethod
    def join(cls, folder: Path, own: Member, keeper: KeeperClient | None) -> "Membership":
        """Joins the group of a folder, which is created if need be; with a keeper this outlives the process.

        With one the record of the process before this one stays: what it says may still be in memory. Raises
        ConfigError if the folder cannot be used, if another process has the worker's place, and if another worker
        knows the group by another size.
        """
        kept = keeper.get(SLEEP_GROUP, str(folder)).descriptors if keeper is not None else ()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(folder, _JOIN_SECONDS) as is_locked:
                if not is_locked:
                    raise ConfigError(f"sleep.group: {folder / _LOCK} has been locked for {_JOIN_SECONDS:g} s")
                found = cls(folder, kept[0] if kept else os.open(_path(folder, own), os.O_RDWR | os.O_CREAT, 0o600))
                found._claim(own, is_kept=bool(kept))
        except OSError as error:
            raise ConfigError(f"sleep.group: {folder} cannot be used: {error}") from error
        if keeper is not None:
            keeper.put(SLEEP_GROUP, str(folder), [found._file])
        return found

    def __enter__(self) -> "Membership":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    @property
    def record(self) -> Member | None:
        """The record that was written last, by this process or the one before it."""
        return _read(self._file)

    def update(self, decide: Callable[[Sequence[Member]], Member]) -> Member | None:
        """Writes this worker's record, which `decide` returns for those of the others. None if the group is being
        changed by another one: try again. Takes well under a millisecond. Raises OSError if the folder is gone.
        """
        with _locked(self._folder) as is_locked:
            if not is_locked:
                return None
            own = decide(self._others())
            self._write(own)
            return own

    def _claim(self, own: Member, *, is_kept: bool) -> None:
        with ExitStack() as undo:
            undo.callback(os.close, self._file)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"sleep.group: {self._folder} has a worker {own.worker_id} already") from None
            for other in self._others():
                if other.group_bytes != own.group_bytes:
                    told = f"{other.worker_id} of the same group says {other.group_bytes}"
                    raise ConfigError(f"sleep.group_bytes: is {own.group_bytes}, but {told}")
            if self.record is None or not is_kept:
                self._write(own)
            undo.pop_all()

    def _write(self, own: Member) -> None:
        os.pwrite(self._file, json.dumps(asdict(own)).encode().ljust(_RECORD_BYTES), 0)

    def _others(self) -> list[Member]:
        """The other workers that live. Removes the files of those that do not."""
        own, found = os.fstat(self._file).st_ino, []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX) and entry.inode() != own and (other := _living(entry.path)) is not None:
                    found.append(other)
        return found


@contextmanager
def _locked(folder: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Holds the group's lock, for no longer than a read and a write; yields False if another one has it for so long."""
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield _lock(file, monotonic() + seconds)
    finally:
        os.close(file)


def _lock(file: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() >= until:
                return False
            sleep(_RETRY_SECONDS)
        else:
            return True


def _living(path: str) -> Member | None:
    """The record of a worker that lives; otherwise None, and the file is removed."""
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(file)
    else:
        os.unlink(path)
        return None
    finally:
        os.close(file)


def _read(file: int) -> Member | None:
    """The record in a file; None if there is none. Later versions may write more."""
    with suppress(ValueError, KeyError):
        content = json.loads(os.pread(file, _RECORD_BYTES, 0))
        return Member(**{each.name: content[each.name] for each in fields(Member)})
    return None


def _path(folder: Path, own: Member) -> Path:
    return folder / f"{hashlib.blake2b(own.worker_id.encode(), digest_size=12).hexdigest()}{_SUFFIX}"
