"""One worker's file in the shared folder, and its name.

Allocation of small ids in a shared folder: each is a file that one process keeps.
"""

from pathlib import Path

import structlog

from baton.errors import BatonError, Unavailable
from discovery.backoff import retry_until
from discovery.file.folder import Lifetimes, SharedFolder, Version
from discovery.record import WorkerRecord
from discovery.renewal import ANSWER_SECONDS, KeptId, RenewedRecord
from runtime.aio import timeout
from runtime.clock import monotonic
from runtime.entropy import token_hex


def worker_and_epoch(name: str) -> tuple[str, int]:
    """The worker's id and epoch from the name of its file. Raises ValueError if it is not one."""
    worker_id, separator, rest = name.partition("@")
    epoch, dot, _ = rest.partition(".")
    if not (worker_id and separator and dot and epoch.isascii() and epoch.isdecimal() and len(epoch) <= 20):
        raise ValueError(f"{name!r:.100} is not the name of a worker's file")
    return worker_id, int(epoch)


class FileRegistration(RenewedRecord):
    """A Registration in a folder. Call `begin`, then run `keep` in a task, then call `end`.

    Two processes of one worker id have a file each; the one of the lower epoch is not registered while the other's is
    alive. Their names end in a random token, so that none can overwrite another's.
    """

    def __init__(self, folder: SharedFolder, workers: Path, record: WorkerRecord, ttl_seconds: float) -> None:
        super().__init__(record, ttl_seconds)
        self._folder = folder
        self._workers = workers
        self._token = token_hex(4)
        self._lifetimes = Lifetimes(ttl_seconds)
        self._path = self._path_of(record)
        self._is_newest = False
        self._holds_until = 0.0

    @property
    def registered(self) -> bool:
        return self._is_newest and monotonic() < self._holds_until

    async def begin(self, timeout_seconds: float) -> None:
        """Registers for the first time. Raises as `Registry.register` does."""
        await retry_until(self._refresh, timeout_seconds, "not registered")

    async def end(self) -> None:
        """Removes the file; if the folder does not answer, its lease expires."""
        self._is_newest = False
        try:
            async with timeout(ANSWER_SECONDS):
                await self._folder.remove(self._path)
        except (BatonError, TimeoutError) as error:
            self._log("worker registration left to expire", error=str(error))

    async def _refresh(self) -> None:
        record, began = self._record, monotonic()
        changed = not self._written.is_set()
        if changed or not await self._folder.touch(self._path):
            await self._write(record)
        self._holds_until = began + self._ttl_seconds
        if record is self._record:
            self._written.set()
        await self._compare(record)

    async def _write(self, record: WorkerRecord) -> None:
        path, previous = self._path_of(record), self._path
        await self._folder.write(path, record.to_json())
        self._path = path
        if previous != path:
            await self._folder.remove(previous)

    async def _compare(self, record: WorkerRecord) -> None:
        self._lifetimes.update(await self._folder.list(self._workers) or {})
        newer = max(map(self._epoch_in, self._lifetimes.alive()), default=-1)
        was_newest, self._is_newest = self._is_newest, newer <= record.epoch
        if was_newest and not self._is_newest:
            self._log("worker id taken by a newer process", newer_epoch=newer)

    def _epoch_in(self, name: str) -> int:
        try:
            worker_id, epoch = worker_and_epoch(name)
        except ValueError:
            return -1
        return epoch if worker_id == self._record.worker_id else -1

    def _path_of(self, record: WorkerRecord) -> Path:
        return self._workers / f"{record.worker_id}@{record.epoch}.{self._token}.json"


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
