"""The registry in etcd."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from copy import copy

from typing_extensions import Self

from discovery.backoff import retry_until
from discovery.etcd.client import EtcdClient
from discovery.etcd.config import EtcdConfig
from discovery.etcd.registration import EtcdAllocatedId, EtcdRegistration, epoch_in
from discovery.etcd.watch import WorkerWatch
from discovery.record import WorkerRecord, epoch_after
from discovery.registry import DEFAULT_LEASE_SECONDS, WorkerKeys, router_lease_seconds
from discovery.renewal import renewed


class EtcdRegistry:
    """A Registry in etcd: `async with EtcdRegistry(config, namespace) as registry: ...`.

    A worker that dies is removed after `lease_ttl_seconds`, rounded up; etcd's minimum is 2 s. Watchers remove no
    worker for `outage_grace_seconds` after an outage of etcd. Raises ConfigError for an invalid namespace.
    """

    def __init__(
        self,
        config: EtcdConfig,
        namespace: str,
        lease_ttl_seconds: float = DEFAULT_LEASE_SECONDS,
        outage_grace_seconds: float | None = None,
    ) -> None:
        self._keys = WorkerKeys(namespace)
        self._client = EtcdClient(config)
        self._start_timeout_seconds = config.start_timeout_seconds
        self._lease_ttl_seconds = lease_ttl_seconds
        self._outage_grace_seconds = lease_ttl_seconds if outage_grace_seconds is None else outage_grace_seconds

    @property
    def routers(self) -> "EtcdRegistry":
        """The registry of routers (`Registry.routers`), over the same connection."""
        registry = copy(self)
        registry._keys = WorkerKeys(self._keys.namespace, "routers")
        registry._lease_ttl_seconds = router_lease_seconds(self._lease_ttl_seconds)
        return registry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[EtcdRegistration]:
        key = self._keys.of(record.worker_id)
        registration = EtcdRegistration(self._client, key, record, self._lease_ttl_seconds)
        async with renewed(registration, self._start_timeout_seconds):
            yield registration

    async def next_epoch(self, worker_id: str) -> int:
        key = self._keys.of(worker_id)
        entry = await retry_until(lambda: self._client.get(key), self._start_timeout_seconds, "no epoch")
        return epoch_after(-1 if entry is None else epoch_in(entry))

    @asynccontextmanager
    async def allocate_id(self, kind: str, limit: int) -> AsyncIterator[EtcdAllocatedId]:
        allocated = EtcdAllocatedId(self._client, self._keys.ids(kind), limit, self._lease_ttl_seconds)
        async with renewed(allocated, self._start_timeout_seconds):
            yield allocated

    async def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        watch = WorkerWatch(self._client, self._keys, self._outage_grace_seconds)
        async with aclosing(watch.views()) as views:
            async for workers in views:
                yield workers
