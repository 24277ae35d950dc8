"""The tier in a file: slots of a block and its seal, written once and read at most once.

The file is of one process, and has no name: it is removed from its folder as soon as it is open, so its space is free
when the process has ended, however it ends. What an earlier process has left under its path is emptied and never read,
and would not be believed, because the seals name the process.
"""

import fcntl
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.errors import ConfigError
from runtime.entropy import token_hex
from services.engines.pytorch.kv_cache.tiers.host import pin, unpin
from services.engines.pytorch.kv_cache.tiers.options import DiskOptions
from services.engines.seals import SEAL_BYTES

_SECTOR = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Host memory for a slot: the block, as words and as bytes of whole sectors, and in another sector the seal."""

    words: torch.Tensor
    data: memoryview
    tail: memoryview

    @property
    def seal(self) -> bytes:
        """The seal of the block."""
        return bytes(self.tail[:SEAL_BYTES])

    def set_seal(self, seal: bytes) -> None:
        """Sets the seal."""
        self.tail[:SEAL_BYTES] = seal


class Buffers:
    """So many buffers, in one mapping: a process may have only some ten thousands."""

    def __init__(self, block_bytes: int, count: int, device: torch.device) -> None:
        data_bytes = -(-block_bytes // _SECTOR) * _SECTOR
        size = data_bytes + _SECTOR
        memory = mmap.mmap(-1, count * size)
        self._words, view = torch.frombuffer(memory, dtype=torch.int32), memoryview(memory)
        self.buffers = [
            Buffer(
                self._words[start // 4 : (start + block_bytes) // 4],
                view[start : start + data_bytes],
                view[start + data_bytes : start + size],
            )
            for start in range(0, count * size, size)
        ]
        self._pinned = device.type == "cuda" and pin(self._words)

    def close(self) -> None:
        """Gives pinned memory back; all of it is freed with its last view."""
        if self._pinned:
            unpin(self._words)
            self._pinned = False


class DiskFile:
    """The file, by slots. Each call is blocking, and raises OSError; threads may call it at the same time."""

    def __init__(self, options: DiskOptions, block_bytes: int) -> None:
        self._slot_bytes = -(-block_bytes // _SECTOR) * _SECTOR + _SECTOR
        self.num_slots = int(options.bytes) // self._slot_bytes
        if not self.num_slots:
            raise ConfigError(f"engine.tiers.disk.bytes: less than one block, {self._slot_bytes} bytes")
        self._file = _open(options)

    def write(self, slot: int, buffer: Buffer) -> None:
        """Writes a block, and then its seal: a write that was interrupted has none, or an old one."""
        start = slot * self._slot_bytes
        _write(self._file, buffer.data, start)
        _write(self._file, buffer.tail, start + len(buffer.data))

    def read(self, slot: int, buffer: Buffer) -> None:
        """Reads a slot."""
        start = slot * self._slot_bytes
        count = os.preadv(self._file, [buffer.data, buffer.tail], start)
        if count < self._slot_bytes:
            raise OSError(f"read {count} of {self._slot_bytes} bytes")

    def close(self) -> None:
        """Closes the file, which frees its space."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _open(options: DiskOptions) -> int:
    """Opens a file past the page cache where the file system can, and locks and removes what is at its path.

    A new file is used, which no other user can have opened, or linked to another one. A path that is no regular file,
    such as a block device, is used itself, and stays. Raises ConfigError.
    """
    key = "engine.tiers.disk.path"
    try:
        file = _open_uncached(options.path)
    except OSError as error:
        raise ConfigError(f"{key}: {options.path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return file
        new = options.path.with_name(f"{options.path.name}.{token_hex(16)}")
        used = _open_uncached(new, os.O_EXCL)
        new.unlink()
        options.path.unlink()
    except OSError as error:
        os.close(file)
        reason = "another worker uses it" if isinstance(error, BlockingIOError) else error.strerror
        raise ConfigError(f"{key}: {options.path}: {reason}") from error
    os.close(file)
    return used


def _open_uncached(path: Path, flags: int = 0) -> int:
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        if flags & os.O_EXCL:
            path.unlink(missing_ok=True)  # made by the first attempt, on some file systems
        return os.open(path, flags, 0o600)


def _write(file: int, data: memoryview, start: int) -> None:
    count = os.pwrite(file, data, start)
    if count < len(data):
        raise OSError(f"wrote {count} of {len(data)} bytes")
