"""Allocation of small ids in etcd: each is a key under a lease."""

import math
import random

import structlog

from baton.errors import BatonError, Unavailable
from discovery.etcd.client import EtcdClient, EtcdLease, LeaseLost
from discovery.keys import end_of
from discovery.renewal import ANSWER_SECONDS, renew_forever
from discovery.retry import retry_until
from runtime.aio import timeout

_log = structlog.get_logger(__name__)


class EtcdAllocatedId:
    """An AllocatedId in etcd. Call `begin`, then run `keep` in a task, then call `end`.

    A key is created and never overwritten, so two processes cannot hold the same id. After losing its lease a process
    takes the same id if it is free, or else another one. During an outage of etcd the id stays valid: etcd cannot give
    it to another process.
    """

    def __init__(self, client: EtcdClient, prefix: bytes, limit: int, ttl_seconds: float) -> None:
        self._client = client
        self._prefix = prefix
        self._limit = limit
        self._ttl_seconds = ttl_seconds
        self._lease: EtcdLease | None = None
        self._value: int | None = None

    @property
    def value(self) -> int:
        assert self._value is not None
        return self._value

    async def begin(self, timeout_seconds: float) -> None:
        """Allocates an id. Raises as `Registry.allocate_id` does."""
        await retry_until(self._take, timeout_seconds, "no id allocated")

    async def keep(self) -> None:
        """Renews the lease until cancelled, and allocates again if it was lost. Raises nothing."""
        await renew_forever(self._renew, self._ttl_seconds, _report)

    async def end(self) -> None:
        """Frees the id; if etcd does not answer, its lease expires."""
        if self._lease is None:
            return
        try:
            async with timeout(ANSWER_SECONDS):
                await self._client.revoke(self._lease)
        except (BatonError, TimeoutError) as error:
            _log.warning("allocated id left to expire", error=str(error))

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


def _report(error: str) -> None:
    _log.warning("allocated id not renewed", error=error)
