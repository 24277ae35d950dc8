"""What this worker holds for others: KV and embeddings that may be being read, each under a lease on its own clock."""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

import structlog
from typing_extensions import Self

from rpc.aio import TaskGroup
from rpc.errors import PermissionDenied
from services import metrics
from services.kv import HeldBlocks
from services.kv_elsewhere import MovingKv

log = structlog.get_logger(__name__)

_REMEMBERED = 4096


@dataclass(eq=False, slots=True)
class Lease:
    """Held blocks, of whatever pool. Times are of the monotonic clock."""

    held: HeldBlocks
    request_id: str
    granted_at: float
    expires_at: float
    holders: frozenset[str] = frozenset()  # certificates of those who may renew and release it; empty is everybody
    handoff_id: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self.expires_at - time.monotonic())

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.granted_at


@dataclass(frozen=True, slots=True)
class Released:
    """What became of a lease at its release, and how many blocks that gave back."""

    still_valid: bool
    blocks_freed: int


class LeaseTable:
    """Owns whatever is given to it, and frees it on release, on expiry, and when the table is closed.

    An async context manager. Safe against cancellation: blocks that are being given back are given back.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._leases: OrderedDict[str, Lease] = OrderedDict()
        # By handoff id: who released it, and the answer. Two readers of one handoff cannot both have had it.
        self._released: OrderedDict[str, tuple[str, asyncio.Task[Released]]] = OrderedDict()
        self._granted = asyncio.Event()
        self._freeing: set[asyncio.Task[Released]] = set()

    async def __aenter__(self) -> Self:
        self._group = await TaskGroup().__aenter__()
        self._reaper = self._group.create_task(self._expire())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reaper.cancel()
        self._end(self._leases.values(), still_valid=False)
        await self._group.__aexit__(None, None, None)

    def __len__(self) -> int:
        """Handoffs whose blocks are not back yet."""
        return len(self._leases) + len(self._freeing)

    @property
    def held(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    def hold(self, request_id: str, held: HeldBlocks, holders: frozenset[str] = frozenset()) -> Lease:
        """Takes `held` over, under a new lease of full length. Only `holders`, if any, may renew and release it."""
        now = time.monotonic()
        lease = Lease(held, request_id, now, now + self.lease_seconds, holders)
        self._leases[lease.handoff_id] = lease
        self._granted.set()
        return lease

    def require_holder(self, handoff_id: str, certificate: str) -> None:
        """Raises PermissionDenied if the lease is for others than this certificate."""
        lease = self._leases.get(handoff_id)
        if lease is not None and lease.holders and certificate not in lease.holders:
            raise PermissionDenied(f"a handoff of request {lease.request_id} is not for {certificate or 'strangers'}")

    def renew(self, handoff_id: str) -> float:
        """Extends a lease to its full length; returns what remains, 0 if it does not hold."""
        lease = self._leases.get(handoff_id)
        if lease is None or not lease.remaining_seconds:
            return 0.0
        lease.expires_at = time.monotonic() + self.lease_seconds
        # All leases have one length, so the order of renewal is the order of expiry.
        self._leases.move_to_end(handoff_id)
        return self.lease_seconds

    async def release(self, handoff_id: str, reader: str = "") -> Released:
        """Ends a lease and frees its blocks. The same reader is answered the same again, for a while."""
        remembered = self._released.get(handoff_id)
        if remembered is None:
            lease = self._leases.get(handoff_id)
            if lease is None:
                metrics.CONFIRMATIONS_REFUSED.inc()
                return Released(still_valid=False, blocks_freed=0)
            task = self._end_one(lease, still_valid=lease.remaining_seconds > 0)
            self._remember(handoff_id, reader, task)
        elif remembered[0] == reader:
            task = remembered[1]
        else:
            metrics.CONFIRMATIONS_REFUSED.inc()
            return Released(still_valid=False, blocks_freed=0)
        return await asyncio.shield(task)

    def fetched(self, handoff_id: str) -> None:
        """Its reader has all of it, which an engine that moves KV itself has to know before it is released."""
        lease = self._leases.get(handoff_id)
        if lease is not None and isinstance(lease.held, MovingKv):
            lease.held.fetched()

    def discard(self, handoff_id: str) -> None:
        """Begins to free a handoff that nobody can ever ask for."""
        lease = self._leases.get(handoff_id)
        if lease is not None:
            self._end_one(lease, still_valid=False)

    def of(self, request_id: str) -> tuple[Lease, ...]:
        """What is held for a request."""
        return tuple(lease for lease in self._leases.values() if lease.request_id == request_id)

    async def release_each(self, leases: Iterable[Lease]) -> int:
        """Ends these leases; returns the number of blocks that are back."""
        return sum([(await asyncio.shield(task)).blocks_freed for task in self._end(leases, still_valid=False)])

    async def release_all(self) -> None:
        """Frees everything that is held."""
        await self.release_each(self._leases.values())

    def _end(self, leases: Iterable[Lease], *, still_valid: bool) -> list[asyncio.Task[Released]]:
        return [self._end_one(lease, still_valid=still_valid) for lease in tuple(leases)]

    def _end_one(self, lease: Lease, *, still_valid: bool) -> "asyncio.Task[Released]":
        if not lease.remaining_seconds:
            metrics.LEASE_EXPIRIES.inc()
            log.info("handoff lease expired", request_id=lease.request_id, blocks=len(lease.held.block_ids))
        del self._leases[lease.handoff_id]
        task = self._group.create_task(_free(lease, still_valid=still_valid))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)
        return task

    def _remember(self, handoff_id: str, reader: str, task: "asyncio.Task[Released]") -> None:
        self._released[handoff_id] = (reader, task)
        while len(self._released) > _REMEMBERED:
            self._released.popitem(last=False)

    async def _expire(self) -> None:
        while True:
            if not self._leases:
                self._granted.clear()
                await self._granted.wait()
                continue  # What was granted may be released again by now.
            first = next(iter(self._leases.values()))
            if first.remaining_seconds:
                await asyncio.sleep(first.remaining_seconds)
            elif self._leases.get(first.handoff_id) is first:
                self._end_one(first, still_valid=False)


async def _free(lease: Lease, *, still_valid: bool) -> Released:
    return Released(still_valid, await lease.held.release())
