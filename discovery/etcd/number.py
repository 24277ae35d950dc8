"""A small number that no other process of a namespace has, kept in etcd under a lease."""

import asyncio
import math
import random

import structlog

from discovery.backoff import Backoff
from discovery.etcd.beginning import insist
from discovery.etcd.client import EtcdClient, Lease, LeaseLost
from discovery.keys import end_of
from rpc.aio import timeout
from rpc.errors import BatonError, Unavailable

_log = structlog.get_logger(__name__)

_PATIENCE_SECONDS = 3.0
_RENEWALS = 3


class EtcdNumber:
    """A Number in etcd. `begin`, then `keep` in a task of its own, then `end`.

    A key is only ever created, never written over, so that two processes cannot both have it. Who loses the lease takes
    the same number again if it is free, and another if it is not. While etcd is away the number is kept: nobody can be
    given it in the meantime.
    """

    def __init__(self, client: EtcdClient, prefix: bytes, limit: int, ttl_seconds: float) -> None:
        self._client = client
        self._prefix = prefix
        self._limit = limit
        self._ttl_seconds = ttl_seconds
        self._lease: Lease | None = None
        self._value: int | None = None

    @property
    def value(self) -> int:
        """See `Number.value`."""
        assert self._value is not None
        return self._value

    async def begin(self, timeout_seconds: float) -> None:
        """Takes a number for the first time. Raises as `Registry.number` does."""
        await insist(self._take, timeout_seconds, "no number")

    async def keep(self) -> None:
        """Renews, and takes a number again where it was lost, until it is cancelled; raises nothing."""
        backoff = Backoff()
        pause_seconds = self._ttl_seconds / _RENEWALS
        while True:
            await asyncio.sleep(pause_seconds)
            try:
                await self._renew()
            except BatonError as error:
                if not backoff.waiting:
                    _log.warning("number not renewed", error=error.message)
                pause_seconds = backoff.next_seconds()
            else:
                backoff.reset()
                pause_seconds = self._ttl_seconds / _RENEWALS * random.uniform(0.8, 1.0)

    async def end(self) -> None:
        """Gives it back; if etcd does not answer the lease runs out by itself."""
        if self._lease is None:
            return
        try:
            async with timeout(_PATIENCE_SECONDS):
                await self._client.revoke(self._lease)
        except (BatonError, TimeoutError) as error:
            _log.warning("number left to expire", error=str(error))

    async def _renew(self) -> None:
        try:
            assert self._lease is not None
            self._lease = await self._client.renew(self._lease)
        except LeaseLost:
            before = self._value
            await self._take()
            _log.warning("number taken again", before=before, now=self._value)

    async def _take(self) -> None:
        lease = await self._client.grant(math.ceil(self._ttl_seconds))
        listing = await self._client.list_range(self._prefix, end_of(self._prefix))
        taken = {int(entry.key[len(self._prefix) :]) for entry in listing.entries}
        free = [number for number in range(self._limit) if number not in taken]
        # Our own first; else by chance, so that those who start at one time seldom want the same.
        random.shuffle(free)
        for number in sorted(free, key=lambda number: number != self._value):
            if await self._client.create(self._prefix + str(number).encode(), b"", lease):
                self._lease, self._value = lease, number
                return
        raise Unavailable(f"all {self._limit} numbers are taken")
