"""The registry in a shared folder."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from copy import copy
from pathlib import Path

from typing_extensions import Self

from discovery.backoff import retry_until
from discovery.file.folder import SharedFolder
from discovery.file.registration import FileAllocatedId, FileRegistration, worker_and_epoch
from discovery.file.watch import FolderWatch
from discovery.record import WorkerRecord, epoch_after
from discovery.registry import DEFAULT_LEASE_SECONDS, WorkerKeys, router_lease_seconds
from discovery.renewal import renewed


class FileRegistry:
    """A Registry in a folder that all hosts share: `async with FileRegistry(path, namespace) as registry: ...`.

    A worker that dies is removed `lease_ttl_seconds` after its last sign of life. On a network file system the lease
    must be longer than the time for which clients cache a file's attributes (NFS: `acregmax`, 60 s by default; mount
    with `actimeo=1`). Watchers list the folder every `poll_seconds`, and remove no worker for `outage_grace_seconds`
    after the folder was away. Raises ConfigError for an invalid namespace.
    """

    def __init__(
        self,
        folder: Path,
        namespace: str,
        lease_ttl_seconds: float = DEFAULT_LEASE_SECONDS,
        outage_grace_seconds: float | None = None,
        *,
        poll_seconds: float = 0.25,
        call_timeout_seconds: float = 2.0,
        start_timeout_seconds: float = 30.0,
    ) -> None:
        self._keys = WorkerKeys(namespace)
        self._folder = SharedFolder(folder, call_timeout_seconds)
        self._workers = self._folder.path(self._keys.prefix)
        self._ttl_seconds = lease_ttl_seconds
        self._grace_seconds = lease_ttl_seconds if outage_grace_seconds is None else outage_grace_seconds
        self._poll_seconds = poll_seconds
        self._start_timeout_seconds = start_timeout_seconds

    @property
    def routers(self) -> "FileRegistry":
        """The registry of routers (`Registry.routers`), with the same folder and thread."""
        registry = copy(self)
        registry._keys = WorkerKeys(self._keys.namespace, "routers")
        registry._workers = self._folder.path(registry._keys.prefix)
        # A longer lease than by default is for a file system that shows changes late.
        if self._ttl_seconds <= DEFAULT_LEASE_SECONDS:
            registry._ttl_seconds = router_lease_seconds(self._ttl_seconds)
        return registry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._folder.close()

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[FileRegistration]:
        self._keys.of(record.worker_id)
        registration = FileRegistration(self._folder, self._workers, record, self._ttl_seconds)
        async with renewed(registration, self._start_timeout_seconds):
            yield registration

    async def next_epoch(self, worker_id: str) -> int:
        self._keys.of(worker_id)
        names = await retry_until(lambda: self._folder.list(self._workers), self._start_timeout_seconds, "no epoch")
        epochs = [epoch for found, epoch in map(_parts, names or {}) if found == worker_id]
        return epoch_after(max(epochs, default=-1))

    @asynccontextmanager
    async def allocate_id(self, kind: str, limit: int) -> AsyncIterator[FileAllocatedId]:
        ids = self._folder.path(self._keys.ids(kind))
        allocated = FileAllocatedId(self._folder, ids, limit, self._ttl_seconds)
        async with renewed(allocated, self._start_timeout_seconds):
            yield allocated

    async def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        watch = FolderWatch(self._folder, self._workers, self._ttl_seconds, self._grace_seconds, self._poll_seconds)
        async with aclosing(watch.views()) as views:
            async for workers in views:
                yield workers


def _parts(name: str) -> tuple[str, int]:
    try:
        return worker_and_epoch(name)
    except ValueError:
        return "", -1
