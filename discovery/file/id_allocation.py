"""Allocation of small ids in a shared folder: each is a file that one process keeps."""

from pathlib import Path

import structlog

from baton.errors import Unavailable
from discovery.allocation import KeptId
from discovery.file.folder import SharedFolder, Version
from discovery.file.lifetimes import Lifetimes
from runtime.entropy import token_hex

_log = structlog.get_logger(__name__)


class FileAllocatedId(KeptId):
    """An AllocatedId in a folder. It waits up to a lease for the ids of processes that are gone.

    A file is created and never overwritten, so two processes cannot create the same one. The file of a process that is
    gone is removed once it has not changed for a lease. A process that stood still for longer than its lease may find
    that its id has another holder, and takes another one.
    """

    def __init__(self, folder: SharedFolder, ids: Path, limit: int, ttl_seconds: float) -> None:
        super().__init__(limit, ttl_seconds)
        self._folder = folder
        self._ids = ids
        self._token = token_hex(8).encode()
        self._lifetimes = Lifetimes(ttl_seconds)

    async def _free(self) -> None:
        if await self._is_ours():
            await self._folder.remove(self._path(self.value))

    async def _renew(self) -> None:
        if await self._is_ours() and await self._folder.touch(self._path(self.value)):
            return
        _log.warning("allocated id lost, allocating again", id=self._value)
        await self._claim()

    async def _is_ours(self) -> bool:
        return await self._folder.read(self._path(self.value)) == self._token

    async def _claim(self) -> None:
        preferred = [] if self._value is None else [self._value]
        for value in (*preferred, *range(self._limit)):
            if await self._folder.create(self._path(value), self._token):
                self._value = value
                return
        await self._remove_expired()
        raise Unavailable(f"all {self._limit} ids are in use")

    async def _remove_expired(self) -> None:
        versions: dict[str, Version] = await self._folder.list(self._ids) or {}
        self._lifetimes.update(versions)
        for name, version in self._lifetimes.expired().items():
            await self._folder.remove(self._ids / name, version=version)

    def _path(self, value: int) -> Path:
        return self._ids / str(value)
