"""Watches the workers of a namespace in etcd, across interruptions."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import structlog

from baton.errors import BatonError, PermissionDenied, Unauthenticated
from baton.etcd.v1 import kv_pb2, watch_pb2
from discovery.backoff import Backoff
from discovery.etcd.client import EtcdClient, Listing
from discovery.membership import Latest, Membership, values_of
from discovery.record import WorkerRecord
from discovery.registry import WorkerKeys

_log = structlog.get_logger(__name__)


class WorkerWatch:
    """The workers of one namespace, for one reader.

    Lists, then watches from the next revision. When the watch breaks it lists again instead of resuming at the last
    revision: the outcome is the same, and it is also right when that revision was compacted, or belongs to lost data.
    For `grace_seconds` after that no worker is removed.
    """

    def __init__(self, client: EtcdClient, keys: WorkerKeys, grace_seconds: float) -> None:
        self._client = client
        self._keys = keys
        self._grace_seconds = grace_seconds
        self._membership = Membership()
        self._latest: Latest[tuple[WorkerRecord, ...]] = Latest()
        self._grace_timer: asyncio.TimerHandle | None = None
        self._listed = False

    async def views(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        try:
            async with aclosing(values_of(self._latest, self._follow())) as views:
                async for workers in views:
                    yield workers
        finally:
            if self._grace_timer is not None:
                self._grace_timer.cancel()

    async def _follow(self) -> None:
        backoff = Backoff()
        while True:
            try:
                listing = await self._client.list_range(self._keys.prefix, self._keys.end)
                self._replace_all(listing)
                async with self._client.watch(self._keys.prefix, self._keys.end, listing) as stream:
                    if backoff.is_retrying:
                        _log.info("worker watch resumed", workers=len(listing.entries))
                    backoff.reset()
                    async for events in stream.events():
                        self._apply(events)
            except BatonError as error:
                if not self._listed and isinstance(error, (Unauthenticated, PermissionDenied)):
                    raise
                if not backoff.is_retrying:
                    _log.warning("worker watch interrupted", error=error.message)
            await asyncio.sleep(backoff.next_seconds())

    def _replace_all(self, listing: Listing) -> None:
        if self._listed:
            self._hold_removals()
        self._listed = True
        self._membership.replace(dict(self._readable(listing.entries)))
        self._latest.set(self._membership.workers)

    def _apply(self, events: Iterable[watch_pb2.Event]) -> None:
        for event in events:
            records = () if event.deleted else tuple(self._readable([event.kv]))
            for key, record in records:
                self._membership.put(key, record)
            if not records:
                self._membership.remove(event.kv.key)
        self._latest.set(self._membership.workers)

    def _readable(self, entries: Iterable[kv_pb2.KeyValue]) -> Iterable[tuple[bytes, WorkerRecord]]:
        for entry in entries:
            try:
                record = WorkerRecord.from_json(entry.value)
                if self._keys.of(record.worker_id) != entry.key:
                    raise ValueError(f"worker_id {record.worker_id!r} differs from the key")
            except (ValueError, BatonError) as error:
                _log.warning("worker record ignored", key=entry.key.decode(errors="replace"), error=str(error))
            else:
                yield entry.key, record

    def _hold_removals(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        self._membership.hold_removals()
        self._grace_timer = asyncio.get_running_loop().call_later(self._grace_seconds, self._apply_removals)

    def _apply_removals(self) -> None:
        self._membership.apply_removals()
        self._latest.set(self._membership.workers)
