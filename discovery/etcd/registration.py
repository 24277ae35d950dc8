"""Keeps one worker's record in etcd under a lease, and puts it back after every loss."""

import asyncio
import math
import random

import structlog
from baton.etcd.v1 import kv_pb2

from discovery.backoff import Backoff
from discovery.etcd.beginning import insist
from discovery.etcd.client import EtcdClient, Lease, LeaseLost
from discovery.record import WorkerRecord
from rpc.aio import timeout
from rpc.errors import BatonError

_log = structlog.get_logger(__name__)

# How long an update, and leaving, wait for an etcd that does not answer.
_PATIENCE_SECONDS = 3.0

# Renewals in the time of one lease.
_RENEWALS = 3


class EtcdRegistration:
    """A Registration in etcd. `begin`, then `keep` in a task of its own, then `end`.

    The key is looked at with every renewal, so that it also comes back when only the key was lost. A process of a
    higher epoch under the same worker id is let be: it is the one that stays, and we are not registered.
    """

    def __init__(self, client: EtcdClient, key: bytes, record: WorkerRecord, ttl_seconds: float) -> None:
        self._client = client
        self._key = key
        self._record = record
        self._ttl_seconds = ttl_seconds
        self._lease: Lease | None = None
        self._key_is_ours = False
        self._update_asked = asyncio.Event()
        self._written = asyncio.Event()

    @property
    def registered(self) -> bool:
        """See `Registration.registered`."""
        return self._key_is_ours and self._lease is not None and self._lease.holds

    async def update(self, record: WorkerRecord) -> None:
        """See `Registration.update`."""
        if record.worker_id != self._record.worker_id:
            raise ValueError(f"{record.worker_id} is not {self._record.worker_id}")
        self._record = record
        self._written.clear()
        self._update_asked.set()
        try:
            async with timeout(_PATIENCE_SECONDS):
                await self._written.wait()
        except TimeoutError:
            self._log("worker record not updated yet")

    async def begin(self, timeout_seconds: float) -> None:
        """Registers for the first time, in place of whoever has the key. Raises as `Registry.register` does."""
        await insist(self._first, timeout_seconds, "not registered")

    async def _first(self) -> None:
        await self._write(await self._grant())

    async def keep(self) -> None:
        """Renews and heals until it is cancelled; raises nothing."""
        backoff = Backoff()
        pause_seconds = self._renewal_seconds()
        while True:
            await self._pause(pause_seconds)
            try:
                await self._refresh()
            except BatonError as error:
                if not backoff.waiting:
                    self._log("worker registration interrupted", error=error.message)
                pause_seconds = backoff.next_seconds()
            else:
                backoff.reset()
                pause_seconds = self._renewal_seconds()

    async def end(self) -> None:
        """Takes the record out of etcd; if etcd does not answer the lease runs out by itself."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            async with timeout(_PATIENCE_SECONDS):
                await self._client.revoke(lease)
        except (BatonError, TimeoutError) as error:
            self._log("worker registration left to expire", error=str(error))

    async def _refresh(self) -> None:
        lease = await self._renewed()
        if lease is None:
            lease = await self._grant()
            self._log("worker lease lost, registering again")
        await self._check_key(lease)

    async def _renewed(self) -> Lease | None:
        """The lease, renewed; None if etcd does not know it any more.

        It is asked even when the deadline has passed: an etcd that was restarted keeps leases for longer.
        """
        if self._lease is None:
            return None
        try:
            self._lease = await self._client.renew(self._lease)
        except LeaseLost:
            self._lease = None
        return self._lease

    async def _grant(self) -> Lease:
        self._key_is_ours = False
        self._lease = await self._client.grant(math.ceil(self._ttl_seconds))
        return self._lease

    async def _check_key(self, lease: Lease) -> None:
        entry = await self._client.get(self._key)
        if entry is not None and entry.lease != lease.lease_id and _epoch(entry) > self._record.epoch:
            self._key_is_ours = False
            self._written.set()
            self._log("worker id taken by a newer process", newer_epoch=_epoch(entry))
        elif entry is None or entry.lease != lease.lease_id or entry.value != self._record.to_json():
            await self._write(lease)
        else:
            self._key_is_ours = True
            self._written.set()

    async def _write(self, lease: Lease) -> None:
        record = self._record
        await self._client.put(self._key, record.to_json(), lease)
        self._key_is_ours = True
        if record is self._record:
            self._written.set()

    async def _pause(self, seconds: float) -> None:
        try:
            async with timeout(seconds):
                await self._update_asked.wait()
        except TimeoutError:
            return
        self._update_asked.clear()

    def _renewal_seconds(self) -> float:
        return self._ttl_seconds / _RENEWALS * random.uniform(0.8, 1.0)

    def _log(self, event: str, **fields: object) -> None:
        _log.warning(event, worker_id=self._record.worker_id, **fields)


def _epoch(entry: kv_pb2.KeyValue) -> int:
    """The epoch in a record; -1 if it cannot be read, so that it is written over."""
    try:
        return WorkerRecord.from_json(entry.value).epoch
    except ValueError:
        return -1
