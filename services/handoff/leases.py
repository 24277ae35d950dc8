"""The KV and embeddings that this worker holds for readers, each under a lease on this worker's clock."""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from typing_extensions import Self

from baton.errors import HandoffLost, PermissionDenied
from runtime.aio import TaskGroup, wait_until_done
from runtime.clock import monotonic
from runtime.entropy import token_urlsafe
from runtime.lasting import lasting
from services.engines.kv import HeldBlocks
from services.engines.kv_transfer import ConfirmsKv, EngineHeldKv
from services.telemetry import metrics

log = structlog.get_logger(__name__)

_REMEMBERED = 4096


class LeaseClock(Protocol):
    """The clock that leases use."""

    def now(self) -> float:
        """Returns monotonic seconds. Safe on every thread."""

    async def sleep(self, seconds: float) -> None:
        """Waits for this many seconds."""


class MonotonicClock:
    """The monotonic clock of this host."""

    def now(self) -> float:
        return monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


MONOTONIC = MonotonicClock()


@dataclass(eq=False, slots=True)
class Lease:
    """Held blocks of a pool. Times are of `clock`."""

    held: HeldBlocks
    request_id: str
    granted_at: float
    expires_at: float
    layout_digest: str  # of the pool that the blocks are in
    holders: frozenset[str] = frozenset()  # certificates that may read, renew and release it; empty allows all
    clock: LeaseClock = field(default=MONOTONIC, repr=False)
    handoff_id: str = field(default_factory=lambda: token_urlsafe(24), repr=False)
    renewable_until: float = math.inf
    reader: str = ""  # the only one that may read it, once one has claimed it

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self.expires_at - self.clock.now())

    @property
    def age_seconds(self) -> float:
        return self.clock.now() - self.granted_at


@dataclass(frozen=True, slots=True)
class Released:
    """The result of a release: whether the lease was valid, and how many blocks it freed."""

    still_valid: bool
    blocks_freed: int


class LeasedReads:
    """A ReadGuard that lets the holders of a lease read its blocks. Other threads call it."""

    def __init__(self, leases: Mapping[str, Lease], layout_digest: str) -> None:
        self._leases = leases
        self._layout_digest = layout_digest

    def may_read(self, handoff_id: str, certificate: str, block_ids: Collection[int]) -> bool:
        lease = self._leases.get(handoff_id)
        if lease is None or not lease.remaining_seconds or lease.layout_digest != self._layout_digest:
            return False
        if lease.holders and certificate not in lease.holders:
            return False
        return set(lease.held.block_ids).issuperset(block_ids)


class LeaseTable:
    """Owns everything that is given to it, and frees it on release, on expiry, and when the table is closed.

    An async context manager. A cancellation does not interrupt freeing.
    """

    def __init__(self, lease_seconds: float, clock: LeaseClock = MONOTONIC) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._leases: OrderedDict[str, Lease] = OrderedDict()
        # By handoff id: the reader that released it, and the answer. A second reader must not get the same answer.
        # A task only while it runs: it keeps the context of its request alive.
        self._released: OrderedDict[str, tuple[str, asyncio.Task[Released] | Released]] = OrderedDict()
        self._granted = asyncio.Event()
        self._freeing: set[asyncio.Task[Released]] = set()
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._group = await self._resources.enter_async_context(TaskGroup())
        self._reaper = self._group.create_task(lasting("lease_expiry", self._expire))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._reaper.cancel()
        self._end(self._leases.values(), still_valid=False)
        await wait_until_done(*self._freeing)
        await self._resources.aclose()

    def __len__(self) -> int:
        """Handoffs whose blocks are not free yet."""
        return len(self._leases) + len(self._freeing)

    @property
    def held(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    def hold(
        self,
        request_id: str,
        held: HeldBlocks,
        layout_digest: str,
        holders: frozenset[str] = frozenset(),
        renewable_seconds: float = math.inf,
    ) -> Lease:
        """Takes ownership of `held`, and grants a lease of full length. Only `holders`, if given, may read, renew and
        release it. After `renewable_seconds` it is not renewed any more.
        """
        now = self._clock.now()
        lease = Lease(held, request_id, now, now + self.lease_seconds, layout_digest, holders, self._clock)
        lease.renewable_until = now + renewable_seconds
        self._leases[lease.handoff_id] = lease
        self._granted.set()
        return lease

    def require_holder(self, handoff_id: str, certificate: str) -> None:
        """Raises PermissionDenied if the lease is for other certificates than this one."""
        lease = self._leases.get(handoff_id)
        if lease is not None and lease.holders and certificate not in lease.holders:
            caller = certificate or "a caller without a certificate"
            raise PermissionDenied(f"{caller} is not authorized for the handoff of request {lease.request_id}")

    def require_held(self, handoff_id: str, layout_digest: str) -> None:
        """Raises HandoffLost unless this handoff is held, in the pool of this layout."""
        lease = self._leases.get(handoff_id)
        if lease is None or not lease.remaining_seconds or lease.layout_digest != layout_digest:
            raise HandoffLost("no such handoff is held here, so its pool may not be read")

    def guard(self, layout_digest: str) -> "LeasedReads":
        """Returns the guard of the pool with this layout."""
        return LeasedReads(self._leases, layout_digest)

    def renew(self, handoff_id: str) -> float:
        """Extends a lease to its full length; returns the remaining seconds, 0 if it is no longer valid."""
        lease = self._leases.get(handoff_id)
        if lease is None or not lease.remaining_seconds or not _is_held(lease):
            return 0.0
        if self._clock.now() > lease.renewable_until:
            return lease.remaining_seconds
        lease.expires_at = self._clock.now() + self.lease_seconds
        # All leases have the same length, so the order of renewal is the order of expiry.
        self._leases.move_to_end(handoff_id)
        return self.lease_seconds

    def claim(self, handoff_id: str, reader: str, state_digest: bytes) -> bool:
        """Makes `reader` the only reader of KV that engines transfer themselves; it has the state with this SHA-256.

        False if another one has claimed it, or if the state is not the one that was given out.
        """
        lease = self._leases.get(handoff_id)
        if lease is None or not isinstance(lease.held, EngineHeldKv) or lease.reader not in ("", reader):
            return False
        if hashlib.sha256(lease.held.engine_state).digest() != state_digest:
            return False
        lease.reader = reader
        return True

    async def release(self, handoff_id: str, reader: str = "") -> Released:
        """Ends a lease and frees its blocks. The same reader gets the same answer if it repeats the call."""
        remembered = self._released.get(handoff_id)
        if remembered is None:
            lease = self._leases.get(handoff_id)
            if lease is None:
                metrics.CONFIRMATIONS_REFUSED.inc()
                return Released(still_valid=False, blocks_freed=0)
            is_reader = lease.reader in ("", reader)
            task = self._end_one(lease, still_valid=lease.remaining_seconds > 0 and is_reader)
            self._remember(handoff_id, reader, task)
        elif remembered[0] != reader:
            metrics.CONFIRMATIONS_REFUSED.inc()
            return Released(still_valid=False, blocks_freed=0)
        elif isinstance(remembered[1], Released):
            return remembered[1]
        else:
            task = remembered[1]
        return await asyncio.shield(task)

    def fetched(self, handoff_id: str) -> None:
        """Notes that the reader has fetched the KV; only engines that transfer KV need it, before `release`."""
        lease = self._leases.get(handoff_id)
        if lease is not None and isinstance(lease.held, EngineHeldKv):
            lease.held.fetched()

    def discard(self, handoff_id: str) -> None:
        """Starts to free a handoff whose id no reader will ever have."""
        lease = self._leases.get(handoff_id)
        if lease is not None:
            self._end_one(lease, still_valid=False)

    def find(self, handoff_id: str) -> Lease | None:
        """The lease with this id, if it is valid."""
        lease = self._leases.get(handoff_id)
        return lease if lease is not None and lease.remaining_seconds else None

    def promote(self, lease: Lease, held: HeldBlocks) -> bool:
        """Replaces what a lease holds, without releasing it, and renews the lease. False if it is not valid any more:
        then nothing has changed.
        """
        if self.find(lease.handoff_id) is not lease:
            return False
        lease.held = held
        self.renew(lease.handoff_id)
        return True

    def surrender(self, lease: Lease) -> None:
        """Ends a lease without freeing anything: the caller owns what it held."""
        del self._leases[lease.handoff_id]

    def of(self, request_id: str) -> tuple[Lease, ...]:
        """Returns the leases of a request."""
        return tuple(lease for lease in self._leases.values() if lease.request_id == request_id)

    async def release_each(self, leases: Iterable[Lease]) -> int:
        """Ends these leases; returns the number of blocks freed."""
        return sum([(await asyncio.shield(task)).blocks_freed for task in self._end(leases, still_valid=False)])

    async def release_all(self) -> None:
        """Frees everything."""
        await self.release_each(self._leases.values())

    def _end(self, leases: Iterable[Lease], *, still_valid: bool) -> list[asyncio.Task[Released]]:
        return [self._end_one(lease, still_valid=still_valid) for lease in tuple(leases)]

    def _end_one(self, lease: Lease, *, still_valid: bool) -> "asyncio.Task[Released]":
        if not lease.remaining_seconds:
            metrics.LEASE_EXPIRIES.inc()
            log.info("handoff lease expired", call_id=lease.request_id, blocks=len(lease.held.block_ids))
        del self._leases[lease.handoff_id]
        # Not in the group: blocks that cannot be freed fail the call that frees them, and not the worker.
        task = asyncio.ensure_future(_free(lease, still_valid=still_valid))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)
        return task

    def _remember(self, handoff_id: str, reader: str, task: "asyncio.Task[Released]") -> None:
        self._released[handoff_id] = (reader, task)
        task.add_done_callback(lambda _: self._keep_answer(handoff_id, reader, task))
        while len(self._released) > _REMEMBERED:
            self._released.popitem(last=False)

    def _keep_answer(self, handoff_id: str, reader: str, task: "asyncio.Task[Released]") -> None:
        if handoff_id in self._released and not task.cancelled() and task.exception() is None:
            self._released[handoff_id] = (reader, task.result())

    async def _expire(self) -> None:
        while True:
            if not self._leases:
                self._granted.clear()
                await self._granted.wait()
                continue  # It may have been released in the meantime.
            first = next(iter(self._leases.values()))
            if first.remaining_seconds:
                await self._clock.sleep(first.remaining_seconds)
            elif self._leases.get(first.handoff_id) is first:
                self._end_one(first, still_valid=False)


def _is_held(lease: Lease) -> bool:
    return not isinstance(lease.held, ConfirmsKv) or lease.held.is_held


async def _free(lease: Lease, *, still_valid: bool) -> Released:
    if still_valid and isinstance(lease.held, ConfirmsKv):
        still_valid = await lease.held.was_held()
    return Released(still_valid, await lease.held.release())
