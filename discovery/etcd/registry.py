"""The registry that lives in etcd."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from typing_extensions import Self

from discovery.etcd.client import EtcdClient
from discovery.etcd.config import EtcdConfig
from discovery.etcd.number import EtcdNumber
from discovery.etcd.registration import EtcdRegistration
from discovery.etcd.watch import WorkerWatch
from discovery.keys import WorkerKeys
from discovery.record import WorkerRecord


class EtcdRegistry:
    """A Registry in etcd: `async with EtcdRegistry(config, namespace) as registry: ...`.

    A worker that dies is gone after `lease_ttl_seconds`, rounded up; etcd itself takes 2 s for the least. Watchers keep
    who is gone for `outage_grace_seconds` after they have lost sight of etcd. Raises ConfigError for a wrong namespace.
    """

    def __init__(
        self,
        config: EtcdConfig,
        namespace: str,
        lease_ttl_seconds: float = 10.0,
        outage_grace_seconds: float | None = None,
    ) -> None:
        self._keys = WorkerKeys(namespace)
        self._client = EtcdClient(config)
        self._start_timeout_seconds = config.start_timeout_seconds
        self._lease_ttl_seconds = lease_ttl_seconds
        self._outage_grace_seconds = lease_ttl_seconds if outage_grace_seconds is None else outage_grace_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[EtcdRegistration]:
        """See `Registry.register`."""
        key = self._keys.of(record.worker_id)
        registration = EtcdRegistration(self._client, key, record, self._lease_ttl_seconds)
        try:
            await registration.begin(self._start_timeout_seconds)
            keeping = asyncio.create_task(registration.keep())
            try:
                yield registration
            finally:
                keeping.cancel()
                await asyncio.wait({keeping})
        finally:
            await registration.end()

    @asynccontextmanager
    async def number(self, kind: str, limit: int) -> AsyncIterator[EtcdNumber]:
        """See `Registry.number`."""
        number = EtcdNumber(self._client, self._keys.numbers(kind), limit, self._lease_ttl_seconds)
        try:
            await number.begin(self._start_timeout_seconds)
            keeping = asyncio.create_task(number.keep())
            try:
                yield number
            finally:
                keeping.cancel()
                await asyncio.wait({keeping})
        finally:
            await number.end()

    async def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        """See `Registry.watch`."""
        watch = WorkerWatch(self._client, self._keys, self._outage_grace_seconds)
        async with aclosing(watch.views()) as views:
            async for workers in views:
                yield workers
