"""A folder that several hosts share: every operation runs in a thread, with a deadline.

Which files of a folder are kept up to date by a living process.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypeVar

from baton.errors import ConfigError, PermissionDenied, Unavailable
from runtime.aio import timeout
from runtime.clock import monotonic
from runtime.entropy import token_hex

T = TypeVar("T")

# What changes whenever a file is written, replaced or touched: inode, modification time in ns, bytes.
Version: TypeAlias = tuple[int, int, int]

_MAX_BYTES = 1 << 20


class SharedFolder:
    """The files below `root`, by the registry's keys.

    A file is replaced as a whole, so a reader never sees a part of one. Every method raises PermissionDenied if the
    operating system refuses, and Unavailable for its other errors or if it does not return within `timeout_seconds`,
    as on a network file system whose server is away.
    """

    def __init__(self, root: Path, timeout_seconds: float) -> None:
        self._root = root
        self._timeout_seconds = timeout_seconds
        # One: operations of a process are in order, and a file system that hangs holds one thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="registry-folder")

    def close(self) -> None:
        """Ends the thread once its last operation returns."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def path(self, key: bytes) -> Path:
        """The file or folder of a key. Raises ConfigError for a key with `.` or `..` as a part."""
        parts = key.decode().strip("/").split("/")
        if "." in parts or ".." in parts:
            raise ConfigError(f"{key.decode()!r}: '.' and '..' are not names in a registry of kind file")
        return self._root.joinpath(*parts)

    async def list(self, folder: Path) -> dict[str, Version] | None:
        """The files of a folder; None if there was no such folder, which is made."""
        return await self._run(lambda: _list(folder))

    async def read(self, path: Path) -> bytes | None:
        """The content of a file; None if it does not exist. Unavailable if it is no regular file, or over 1 MiB."""
        return await self._run(lambda: _read(path))

    async def write(self, path: Path, content: bytes) -> None:
        """Creates or replaces a file."""
        await self._run(lambda: _write(path, content))

    async def create(self, path: Path, content: bytes) -> bool:
        """Creates a file; False if it exists."""
        return await self._run(lambda: _create(path, content))

    async def touch(self, path: Path) -> bool:
        """Changes a file's version and not its content; False if it does not exist."""
        return await self._run(lambda: _touch(path))

    async def remove(self, path: Path, *, version: Version | None = None) -> None:
        """Removes a file if it exists; with `version`, only if it has not changed since."""
        await self._run(lambda: _remove(path, version))

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            async with timeout(self._timeout_seconds):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except PermissionError as error:
            raise PermissionDenied(f"registry folder {self._root}: {error}") from error
        except TimeoutError as error:
            message = f"registry folder {self._root}: no answer within {self._timeout_seconds:g} s"
            raise Unavailable(message) from error
        except OSError as error:
            raise Unavailable(f"registry folder {self._root}: {error}") from error


def _list(folder: Path) -> dict[str, Version] | None:
    versions: dict[str, Version] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                version = None if entry.name.startswith(".") else _version(Path(entry.path))
                if version is not None:
                    versions[entry.name] = version
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
        return None
    return versions


def _version(path: Path) -> Version | None:
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _read(path: Path) -> bytes | None:
    try:
        # A link could lead anywhere, and opening a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(f"{path} is larger than {_MAX_BYTES} bytes")
    return content


def _write(path: Path, content: bytes) -> None:
    temporary = _write_temporary(path, content)
    os.replace(temporary, path)


def _create(path: Path, content: bytes) -> bool:
    temporary = _write_temporary(path, content)
    try:
        # Unlike an exclusive open, a link appears with its content.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _write_temporary(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{token_hex(4)}")
    temporary.write_bytes(content)
    return temporary


def _touch(path: Path) -> bool:
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _remove(path: Path, version: Version | None) -> None:
    if version is None or _version(path) == version:
        path.unlink(missing_ok=True)


# After this many leases without a change a file is removed: its process is gone for good.
_LEASES_UNTIL_REMOVAL = 10


class Lifetimes:
    """The time of each file's last change in a folder, by the clock of this process.

    A file is alive for `ttl_seconds` after a change was seen, and after it was first seen: how old it was then cannot
    be known, for the clocks of two hosts may differ.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._seen: dict[str, tuple[Version, float]] = {}

    def update(self, versions: Mapping[str, Version]) -> None:
        """Takes a listing of the folder."""
        now = self._clock()
        self._seen = {name: (version, self._changed_at(name, version, now)) for name, version in versions.items()}

    def extend(self, seconds: float) -> None:
        """Keeps every file alive for at least so long from now: during an outage no change could be seen."""
        changed = self._clock() + seconds - self._ttl_seconds
        self._seen = {name: (version, max(at, changed)) for name, (version, at) in self._seen.items()}

    def alive(self) -> list[str]:
        """The files that changed within the lease, by name."""
        now = self._clock()
        return sorted(name for name, (_, at) in self._seen.items() if now - at <= self._ttl_seconds)

    def expired(self) -> dict[str, Version]:
        """The files that have not changed for a lease."""
        now = self._clock()
        return {name: version for name, (version, at) in self._seen.items() if now - at > self._ttl_seconds}

    def abandoned(self) -> dict[str, Version]:
        """The files that have not changed for ten leases."""
        oldest = self._clock() - _LEASES_UNTIL_REMOVAL * self._ttl_seconds
        return {name: version for name, (version, at) in self._seen.items() if at < oldest}

    def _changed_at(self, name: str, version: Version, now: float) -> float:
        known = self._seen.get(name)
        return now if known is None or known[0] != version else known[1]
