"""Keeps one worker's record in etcd under a lease, and writes it again after a loss.

Allocation of small ids in etcd: each is a key under a lease.
"""

import math
import random

import structlog

from baton.errors import BatonError, Unavailable
from baton.etcd.v1 import kv_pb2
from discovery.backoff import retry_until
from discovery.etcd.client import EtcdClient, EtcdLease, LeaseLost
from discovery.record import WorkerRecord
from discovery.registry import end_of
from discovery.renewal import ANSWER_SECONDS, KeptId, RenewedRecord
from runtime.aio import timeout


class EtcdRegistration(RenewedRecord):
    """A Registration in etcd. Call `begin`, then run `keep` in a task, then call `end`.

    Each renewal also checks the key, and writes it again if it was lost. If a process of a higher epoch has the same
    worker id, its record stays, and this process is not registered.
    """

    def __init__(self, client: EtcdClient, key: bytes, record: WorkerRecord, ttl_seconds: float) -> None:
        super().__init__(record, ttl_seconds)
        self._client = client
        self._key = key
        self._lease: EtcdLease | None = None
        self._key_is_ours = False

    @property
    def registered(self) -> bool:
        return self._key_is_ours and self._lease is not None and self._lease.holds

    async def begin(self, timeout_seconds: float) -> None:
        """Registers for the first time, and overwrites another process's record. Raises as `Registry.register` does."""
        await retry_until(self._first, timeout_seconds, "not registered")

    async def _first(self) -> None:
        await self._write(await self._grant())

    async def end(self) -> None:
        """Removes the record from etcd; if etcd does not answer, its lease expires."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            async with timeout(ANSWER_SECONDS):
                await self._client.revoke(lease)
        except (BatonError, TimeoutError) as error:
            self._log("worker registration left to expire", error=str(error))

    async def _refresh(self) -> None:
        lease = await self._renewed()
        if lease is None:
            lease = await self._grant()
            self._log("worker lease lost, registering again")
        await self._check_key(lease)

    async def _renewed(self) -> EtcdLease | None:
        """The renewed lease; None if etcd no longer knows it.

        Renews even after the deadline: an etcd that was restarted keeps leases for longer.
        """
        if self._lease is None:
            return None
        try:
            self._lease = await self._client.renew(self._lease)
        except LeaseLost:
            self._lease = None
        return self._lease

    async def _grant(self) -> EtcdLease:
        self._key_is_ours = False
        self._lease = await self._client.grant(math.ceil(self._ttl_seconds))
        return self._lease

    async def _check_key(self, lease: EtcdLease) -> None:
        entry = await self._client.get(self._key)
        if entry is not None and entry.lease != lease.lease_id and epoch_in(entry) > self._record.epoch:
            self._key_is_ours = False
            self._written.set()
            self._log("worker id taken by a newer process", newer_epoch=epoch_in(entry))
        elif entry is None or entry.lease != lease.lease_id or entry.value != self._record.to_json():
            await self._write(lease)
        else:
            self._key_is_ours = True
            self._written.set()

    async def _write(self, lease: EtcdLease) -> None:
        record = self._record
        await self._client.put(self._key, record.to_json(), lease)
        self._key_is_ours = True
        if record is self._record:
            self._written.set()


def epoch_in(entry: kv_pb2.KeyValue) -> int:
    """The epoch in a record; -1 if it cannot be read, so that it is overwritten."""
    try:
        return WorkerRecord.from_json(entry.value).epoch
    except ValueError:
        return -1


_log = structlog.get_logger(__name__)


class EtcdAllocatedId(KeptId):
    """An AllocatedId in etcd.

    A key is created and never overwritten, so two processes cannot hold the same id. After losing its lease a process
    takes the same id if it is free, or else another one. During an outage of etcd the id stays valid: etcd cannot give
    it to another process.
    """

    def __init__(self, client: EtcdClient, prefix: bytes, limit: int, ttl_seconds: float) -> None:
        super().__init__(limit, ttl_seconds)
        self._client = client
        self._prefix = prefix
        self._lease: EtcdLease | None = None

    async def _free(self) -> None:
        assert self._lease is not None
        await self._client.revoke(self._lease)

    async def _renew(self) -> None:
        try:
            assert self._lease is not None
            self._lease = await self._client.renew(self._lease)
        except LeaseLost:
            before = self._value
            await self._claim()
            _log.warning("allocated id taken again", before=before, now=self._value)

    async def _claim(self) -> None:
        lease = await self._client.grant(math.ceil(self._ttl_seconds))
        listing = await self._client.list_range(self._prefix, end_of(self._prefix))
        taken = {int(entry.key[len(self._prefix) :]) for entry in listing.entries}
        free = [one for one in range(self._limit) if one not in taken]
        # The former id first; the others at random, so that processes that start together seldom choose the same.
        random.shuffle(free)
        for one in sorted(free, key=lambda one: one != self._value):
            if await self._client.create(self._prefix + str(one).encode(), b"", lease):
                self._lease, self._value = lease, one
                return
        raise Unavailable(f"all {self._limit} ids are in use")
