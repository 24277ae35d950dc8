"""Requests that wait for a tenant's quota: for a router that lends it, or for the bucket of one that began empty.

Those of a tenant at one router are served as they came. Each gives up soon enough for its client to hear why.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from baton.engine.v1 import peer_pb2
from baton.errors import QuotaExceeded, QuotaUnavailable
from router.admission.peers import Peers
from router.admission.quota_state import QuotaNeed, TenantQuota
from router.config import QuotasConfig
from router.routing.latency import Clock
from router.telemetry import metrics
from runtime.aio import timeout

SOON_SECONDS = 2.0  # in which another router lends, if one does at all: requests wait so long, also for its bucket
_BEFORE_DEADLINE = 0.9  # of the caller's time, after which a request that waits is refused
_LOOK_SECONDS = 0.2  # between two looks for a lender if no promise changes: it may hear of the last change later
_SHORTEST_RETRY_SECONDS = 0.01  # whatever a home says
_LONGEST_RETRY_SECONDS = 3600.0
_WHY = {
    peer_pb2.QUOTA_KIND_REQUESTS: "the rate of requests is exceeded",
    peer_pb2.QUOTA_KIND_TOKENS: "the rate of tokens is exceeded by a prompt of {}",
    peer_pb2.QUOTA_KIND_CONCURRENT: "as many requests are running as may",
}

# Raises nothing; None if no router lends.
Borrow: TypeAlias = Callable[[TenantQuota, QuotaNeed], Awaitable[peer_pb2.QuotaLoan | None]]


class QuotaWaits:
    """Uses what `borrow` gets, as soon as there is enough."""

    def __init__(self, borrow: Borrow, config: QuotasConfig, clock: Clock, peers: Peers, wait_seconds: float) -> None:
        self._borrow = borrow
        self._config = config
        self._clock = clock
        self._peers = peers
        self._wait_seconds = wait_seconds

    async def use(self, tenant: TenantQuota, need: QuotaNeed, within_seconds: float) -> None:
        """Raises QuotaExceeded and QuotaUnavailable, within so many seconds."""
        if not tenant.is_limited:
            return
        queue, now, seconds = tenant.queue(need), self._clock(), tenant.seconds_of(need)
        gives_up_at = now + min(self._wait_seconds, _BEFORE_DEADLINE * within_seconds)
        served_at = queue.served_at(queue.joined_seconds + seconds)
        if queue.refusal is not None and served_at >= gives_up_at:
            raise _exceeded(tenant, need, queue.refusal, served_at - now)
        with queue.join(seconds) as end:
            await self._await_turn(tenant, need, end, gives_up_at)
            try:
                await self._use_in_turn(tenant, need, gives_up_at)
            finally:
                queue.refusal = None
                queue.turn.release()

    async def _await_turn(self, tenant: TenantQuota, need: QuotaNeed, end: float, gives_up_at: float) -> None:
        """Waits for those ahead, whose deadlines may be later. Raises as `use`."""
        queue = tenant.queue(need)
        if queue.length == 1:
            await queue.turn.acquire()
            return
        try:
            async with timeout(gives_up_at - self._clock()):
                await queue.turn.acquire()
        except TimeoutError:
            if queue.refusal is None:
                raise (_unavailable(tenant.name) if tenant.is_unlent else _behind(tenant)) from None
            raise _exceeded(tenant, need, queue.refusal, queue.served_at(end) - self._clock()) from None

    async def _use_in_turn(self, tenant: TenantQuota, need: QuotaNeed, gives_up_at: float) -> None:
        while True:
            change = self._peers.next_change()
            loan = await self._borrow(tenant, need)
            if loan is None:
                if self._is_allowed_without(tenant, gives_up_at):
                    return
                tenant.queue(need).refusal = None
                await self._await_lender(tenant, change, gives_up_at)
            elif loan.granted:
                return
            else:
                await self._await_refill(tenant, need, loan, gives_up_at)

    def _is_allowed_without(self, tenant: TenantQuota, gives_up_at: float) -> bool:
        """True if a use is allowed while no router lends; False if a lender may come soon. Raises QuotaUnavailable."""
        now = self._clock()
        if now > tenant.away_at + SOON_SECONDS + self._config.unreachable_seconds:
            tenant.away_since = now
        tenant.away_at = now
        seconds = now - tenant.away_since
        if self._config.unreachable == "allow" and seconds >= self._config.unreachable_seconds:
            metrics.QUOTA_FALLBACKS.labels("allowed").inc()
            return True
        if seconds < self._wait_seconds and now < gives_up_at:
            return False
        raise _unavailable(tenant.name)

    async def _await_lender(self, tenant: TenantQuota, change: asyncio.Event, gives_up_at: float) -> None:
        """Returns when another router may lend."""
        try:
            async with timeout(min(_LOOK_SECONDS, gives_up_at - self._clock())):
                await change.wait()
            tenant.unlent_at = -math.inf
        except TimeoutError:
            pass

    async def _await_refill(
        self, tenant: TenantQuota, need: QuotaNeed, loan: peer_pb2.QuotaLoan, gives_up_at: float
    ) -> None:
        """Waits until the bucket of a lender that began with nothing has enough. Raises QuotaExceeded at others."""
        queue, seconds = tenant.queue(need), max(_SHORTEST_RETRY_SECONDS, refusal_seconds(loan))
        refills_at = self._clock() + seconds
        if not loan.began_empty or refills_at >= gives_up_at:
            raise _exceeded(tenant, need, loan, seconds)
        queue.refusal, queue.refills_from = loan, refills_at - tenant.seconds_of(need)
        await asyncio.sleep(seconds)


def refusal_seconds(loan: peer_pb2.QuotaLoan) -> float:
    """The time after which a refused need is to ask again."""
    return float(loan.retry_after.ToNanoseconds() / 1e9)


def _unavailable(name: str) -> QuotaUnavailable:
    metrics.QUOTA_FALLBACKS.labels("refused").inc()
    metrics.REFUSALS.labels(QuotaUnavailable.reason).inc()
    return QuotaUnavailable(f"no router has lent the quota of tenant {name!r:.140} in time")


def _behind(tenant: TenantQuota) -> QuotaExceeded:
    """The error for a request that has waited for its turn alone, while a router lends."""
    metrics.REFUSALS.labels(QuotaExceeded.reason).inc()
    subject = tenant.name or "default"
    why = f"tenant {subject}: requests that came before this one waited for the quota until its deadline"
    return QuotaExceeded(why, subject=subject, retry_after_seconds=_SHORTEST_RETRY_SECONDS)


def _exceeded(tenant: TenantQuota, need: QuotaNeed, loan: peer_pb2.QuotaLoan, seconds: float) -> QuotaExceeded:
    """The error for a need that `loan` refuses, or refuses to a request ahead of it, and that may pass after a time."""
    metrics.REFUSALS.labels(QuotaExceeded.reason).inc()
    subject, why = tenant.name or "default", _WHY.get(loan.exceeded, "the quota is exceeded").format(need.tokens)
    if loan.began_empty:
        why += "; the router that lends it is a new one, which began with nothing"
    seconds = min(_LONGEST_RETRY_SECONDS, max(_SHORTEST_RETRY_SECONDS, seconds))
    return QuotaExceeded(f"tenant {subject}: {why}", subject=subject, retry_after_seconds=seconds)
