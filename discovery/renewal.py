"""A process' entries in the registry while a context is open: allocated or registered, renewed, and given up.

The life of an allocated small id, whatever keeps it.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import structlog

from baton.errors import BatonError
from discovery.backoff import Backoff, retry_until
from discovery.record import WorkerRecord
from runtime.aio import timeout
from runtime.lasting import lasting

_log = structlog.get_logger(__name__)

# How long an update, and the end of an entry, wait for the registry.
ANSWER_SECONDS = 3.0
_RENEWALS_PER_LEASE = 3


class Renewed(Protocol):
    """An entry of the registry under a lease."""

    async def begin(self, timeout_seconds: float) -> None:
        """Makes the entry for the first time. Raises what entering the context should raise."""

    async def keep(self) -> None:
        """Renews the entry until cancelled. Raises nothing."""

    async def end(self) -> None:
        """Removes the entry, or leaves it to expire. Raises nothing."""


Entry = TypeVar("Entry", bound=Renewed)


@asynccontextmanager
async def renewed(entry: Entry, timeout_seconds: float) -> AsyncIterator[Entry]:
    """Keeps an entry while the context is open; entering waits up to `timeout_seconds` for the registry."""
    try:
        await entry.begin(timeout_seconds)
        keeping = asyncio.create_task(lasting("registration", entry.keep))
        try:
            yield entry
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
    finally:
        await entry.end()


async def renew_forever(
    refresh: Callable[[], Awaitable[None]],
    ttl_seconds: float,
    report: Callable[[str], None],
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Calls `refresh` three times a lease, until cancelled; after a failure sooner, with backoff.

    `report` gets the message of the first failure of a row. `pause` waits for so many seconds at most.
    """
    backoff = Backoff()
    seconds = _renewal_seconds(ttl_seconds)
    while True:
        await pause(seconds)
        try:
            await refresh()
        except BatonError as error:
            if not backoff.is_retrying:
                report(error.message)
            seconds = backoff.next_seconds()
        else:
            backoff.reset()
            seconds = _renewal_seconds(ttl_seconds)


def _renewal_seconds(ttl_seconds: float) -> float:
    return ttl_seconds / _RENEWALS_PER_LEASE * random.uniform(0.8, 1.0)


class RenewedRecord(ABC):
    """A worker's record, which `keep` renews. A registry's Registration says how, in `_refresh`.

    `_written` is set while the registry has `_record`, or has one of a newer process.
    """

    def __init__(self, record: WorkerRecord, ttl_seconds: float) -> None:
        self._record = record
        self._ttl_seconds = ttl_seconds
        self._update_asked = asyncio.Event()
        self._written = asyncio.Event()

    async def update(self, record: WorkerRecord) -> None:
        if record.worker_id != self._record.worker_id:
            raise ValueError(f"{record.worker_id} is not {self._record.worker_id}")
        self._record = record
        self._written.clear()
        self._update_asked.set()
        try:
            async with timeout(ANSWER_SECONDS):
                await self._written.wait()
        except TimeoutError:
            self._log("worker record not updated yet")

    async def keep(self) -> None:
        """Renews the record, and writes it again after losses, until cancelled. Raises nothing."""
        await renew_forever(self._refresh, self._ttl_seconds, self._report, self._pause)

    @abstractmethod
    async def _refresh(self) -> None:
        """Renews the record once, and writes it if it has changed or was lost. Raises BatonError."""

    async def _pause(self, seconds: float) -> None:
        try:
            async with timeout(seconds):
                await self._update_asked.wait()
        except TimeoutError:
            return
        self._update_asked.clear()

    def _report(self, error: str) -> None:
        self._log("worker registration interrupted", error=error)

    def _log(self, event: str, **fields: object) -> None:
        _log.warning(event, worker_id=self._record.worker_id, **fields)


log = structlog.get_logger(__name__)


class KeptId:
    """An AllocatedId of at most `limit`. Call `begin`, then run `keep` in a task, then call `end`.

    A subclass takes an id by `_claim`, renews it by `_renew`, which takes one again if it was lost, and frees it by
    `_free`.
    """

    def __init__(self, limit: int, ttl_seconds: float) -> None:
        self._limit = limit
        self._ttl_seconds = ttl_seconds
        self._value: int | None = None

    @property
    def value(self) -> int:
        assert self._value is not None
        return self._value

    async def begin(self, timeout_seconds: float) -> None:
        """Allocates an id. Raises as `Registry.allocate_id` does."""
        await retry_until(self._claim, timeout_seconds, "no id allocated")

    async def keep(self) -> None:
        """Renews it until cancelled, and allocates again if it was lost. Raises nothing."""
        await renew_forever(self._renew, self._ttl_seconds, _report)

    async def end(self) -> None:
        """Frees the id; without an answer, its lease expires."""
        if self._value is None:
            return
        try:
            async with timeout(ANSWER_SECONDS):
                await self._free()
        except (BatonError, TimeoutError) as error:
            log.warning("allocated id left to expire", error=str(error))

    async def _claim(self) -> None:
        raise NotImplementedError

    async def _renew(self) -> None:
        raise NotImplementedError

    async def _free(self) -> None:
        raise NotImplementedError


def _report(error: str) -> None:
    log.warning("allocated id not renewed", error=error)
