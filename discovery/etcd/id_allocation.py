"""Allocation of small ids in etcd: each is a key under a lease."""

import math
import random

import structlog

from baton.errors import Unavailable
from discovery.allocation import KeptId
from discovery.etcd.client import EtcdClient, EtcdLease, LeaseLost
from discovery.keys import end_of

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
            await self._take()
            _log.warning("allocated id taken again", before=before, now=self._value)

    async def _take(self) -> None:
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
