"""Quotas of tenants, which all routers of a fleet share: each tenant's home lends the others what they use.

What a router has borrowed it uses without asking. While no router lends a quota, requests are refused.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import astuple
from itertools import islice

from baton.engine.v1 import peer_pb2
from baton.errors import BatonError
from router.admission.ledger import LOAN_SECONDS, THIS_ROUTER, Ledger
from router.admission.peers import ALONE, Peers
from router.admission.quota_state import NOTHING, QuotaNeed, TenantQuota
from router.admission.quota_waits import SOON_SECONDS, QuotaWaits, refusal_seconds
from router.config import QuotaConfig, QuotasConfig
from router.routing.latency import Clock
from router.telemetry.stats import RequestStats
from runtime.clock import monotonic

# Beyond this number tenants without running requests and debts are forgotten; see ledger.py.
_MOST_TENANTS = 10_000
_LOOKED_AT = 4
_CHUNK_SECONDS = 0.1  # of its demand, which a router borrows beside what it needs
_SETTLE_SECONDS = 0.25  # until what was used beyond a loan is told
_MOST_SETTLED = 1024  # tenants at once
_COUNT_SECONDS = 2.0  # after which the number of running requests is told again
_REFUSED_SECONDS = 0.05  # for which a refusal, or that no router lends, is repeated without asking
_NO_QUOTA = QuotaConfig()
_GRANTED = peer_pb2.QuotaLoan(granted=True)
_UNLIMITED: AbstractAsyncContextManager[None] = nullcontext()


class Quotas:
    """The quotas of all tenants, as this router uses them. `follow` must run if there are other routers."""

    def __init__(
        self,
        config: QuotasConfig,
        clock: Clock = monotonic,
        peers: Peers = ALONE,
        wait_seconds: float = SOON_SECONDS,
    ) -> None:
        self.ledger = Ledger(config, clock)
        self.is_unlimited = config.are_none  # for every tenant
        self._config = config
        self._clock = clock
        self._peers = peers
        self._waits = QuotaWaits(self._borrow, config, clock, peers, wait_seconds)
        self._tenants: OrderedDict[str, TenantQuota] = OrderedDict()  # least recently seen first
        self._unsettled: dict[str, TenantQuota] = {}
        self._running: dict[str, TenantQuota] = {}  # those whose number of running requests is limited
        self._counted_at = clock()

    @property
    def remembered(self) -> int:
        """The number of remembered tenants."""
        return max(len(self._tenants), self.ledger.remembered)

    def track(
        self, name: str, stats: RequestStats, requests: int = 1, within_seconds: float = math.inf
    ) -> AbstractAsyncContextManager[None]:
        """Counts a request of a tenant, and at its end the generated tokens. Raises QuotaExceeded, QuotaUnavailable:
        soon enough for a caller that waits for `within_seconds` to hear of it.

        One that goes on with an answer counts as running, and as 0 `requests`.
        """
        return _UNLIMITED if self.is_unlimited else self._track(name, stats, requests, within_seconds)

    @asynccontextmanager
    async def _track(self, name: str, stats: RequestStats, requests: int, within_seconds: float) -> AsyncIterator[None]:
        tenant, running = self._find(name), 0
        try:
            await self._waits.use(tenant, QuotaNeed(requests=requests, beginning=1), within_seconds)
            # Not before: a request that waits does not run. Nothing is awaited between its loan and this.
            running = 1
            tenant.running += running
            if tenant.quota.concurrent:
                self._running[name] = tenant
            yield
        finally:
            tenant.running -= running
            if not tenant.running:
                self._running.pop(name, None)
            self._note_spent(tenant, max(0, stats.completion_tokens - stats.charged_tokens))

    def charge(
        self, name: str, prompt_tokens: int, within_seconds: float = math.inf
    ) -> AbstractAsyncContextManager[None]:
        """Takes a prompt's tokens, and gives them back if the body fails. Raises as `track`."""
        return _UNLIMITED if self.is_unlimited else self._charge(name, prompt_tokens, within_seconds)

    @asynccontextmanager
    async def _charge(self, name: str, prompt_tokens: int, within_seconds: float) -> AsyncIterator[None]:
        tenant = self._find(name)
        await self._waits.use(tenant, QuotaNeed(tokens=prompt_tokens), within_seconds)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                self._give_back(tenant, prompt_tokens)

    async def follow(self) -> None:
        """Tells other homes what was used beyond loans, and gives back what is left of them, until cancelled."""
        while True:
            await asyncio.sleep(_SETTLE_SECONDS)
            await self.settle()

    async def settle(self) -> None:
        """Tells the homes once."""
        now = self._clock()
        if now >= self._counted_at + _COUNT_SECONDS:
            self._counted_at = now
            self._unsettled.update(self._running)
            for tenant in self._running.values():
                tenant.is_told = False
        names = list(self._unsettled)[:_MOST_SETTLED]
        tenants = [self._unsettled.pop(name) for name in names]
        await asyncio.gather(*(self._settle(tenant) for tenant in tenants))

    async def _settle(self, tenant: TenantQuota) -> None:
        if self._use_here(tenant, NOTHING) is not None:
            return
        async with tenant.lock:
            left_seconds = tenant.expires_at - self._clock()
            if tenant.spent or not tenant.is_told or 0 < left_seconds < 2 * _SETTLE_SECONDS:
                await self._ask(tenant, NOTHING)
            if tenant.spent or not tenant.is_told or (left_seconds > 0 and (tenant.requests > 0 or tenant.tokens > 0)):
                self._unsettled[tenant.name] = tenant

    def left(self, names: Iterable[str]) -> Iterator[tuple[str, float | None, float | None]]:
        """Requests and tokens that are left to these tenants, and to those with quotas of their own; None without a
        limit. Only of tenants whose home is here.
        """
        for name in {*names, *islice(self._config.tenants, _MOST_SETTLED)}:
            account = self.ledger.known(name)
            if account is not None and self._peers.lends_since(name) is not None:
                requests, tokens = account.requests, account.tokens
                yield name, requests.level if requests.rate else None, tokens.level if tokens.rate else None

    # One use.

    async def _borrow(self, tenant: TenantQuota, need: QuotaNeed) -> peer_pb2.QuotaLoan | None:
        """The share that is lent here, was lent already, or is lent now; None if no router lends."""
        loan = self._use_here(tenant, need)
        if loan is not None:
            return loan
        self._note_demand(tenant, need)
        if self._use_loan(tenant, need):
            return _GRANTED
        async with tenant.lock:
            if self._use_loan(tenant, need):
                return _GRANTED
            if (refusal := self._last_refusal(tenant, need)) is not None:
                return refusal
            if self._clock() < tenant.unlent_at + _REFUSED_SECONDS:
                return None
            return await self._ask(tenant, need)

    def _use_here(self, tenant: TenantQuota, need: QuotaNeed) -> peer_pb2.QuotaLoan | None:
        """Lends to this router itself; None if another one lends, or none."""
        since = self._peers.lends_since(tenant.name)
        if since is None:
            return None
        tenant.away_at = -math.inf
        # Also what was used under an earlier home.
        self.ledger.account(tenant.name, since).tokens.take(tenant.spent)
        tenant.spent = tenant.requests = tenant.tokens = 0.0
        ask = peer_pb2.QuotaAsk(
            tenant=tenant.name,
            requests=need.requests,
            tokens=need.tokens,
            running=tenant.running,
            beginning=need.beginning,
        )
        return self.ledger.lend(THIS_ROUTER, ask, since)

    def _use_loan(self, tenant: TenantQuota, need: QuotaNeed) -> bool:
        quota, has_expired = tenant.quota, self._clock() >= tenant.expires_at
        if has_expired or (need.beginning and quota.concurrent):
            return False
        if quota.requests_per_second and need.requests > tenant.requests:
            return False
        if quota.tokens_per_second and need.tokens > tenant.tokens:
            return False
        tenant.requests -= need.requests
        tenant.tokens -= need.tokens
        return True

    async def _ask(self, tenant: TenantQuota, need: QuotaNeed) -> peer_pb2.QuotaLoan | None:
        """Gives the last loan back and asks for another one; None if no router lends. Holds the lock."""
        for lender in self._peers.lenders(tenant.name):
            loan = None if lender == THIS_ROUTER else await self._ask_one(lender, tenant, need)
            if loan is not None:
                return loan
        tenant.unlent_at = self._clock()
        return None

    async def _ask_one(self, lender: str, tenant: TenantQuota, need: QuotaNeed) -> peer_pb2.QuotaLoan | None:
        asked_at = self._clock()
        ask = self._ask_of(tenant, need, is_valid=asked_at < tenant.expires_at)
        tenant.requests = tenant.tokens = 0.0
        tenant.spent, is_told, tenant.is_told = 0.0, False, True
        try:
            loan = await self._peers.lend(lender, ask)
            is_told = not loan.not_home
        except BatonError:
            return None
        finally:
            if not is_told:
                tenant.spent += ask.spent_tokens
                tenant.is_told = False
        # An answer that comes later than a loan expires is of no use: others may have been lent the same by then.
        if loan.not_home or self._clock() >= asked_at + LOAN_SECONDS:
            return None
        tenant.away_at = -math.inf
        tenant.requests, tenant.tokens = loan.more_requests, loan.more_tokens
        tenant.expires_at = asked_at + LOAN_SECONDS
        if not loan.granted:
            tenant.refusal = (self._clock() + min(_REFUSED_SECONDS, refusal_seconds(loan)), need, loan)
        elif tenant.requests or tenant.tokens:
            self._unsettled[tenant.name] = tenant
        return loan

    def _ask_of(self, tenant: TenantQuota, need: QuotaNeed, *, is_valid: bool) -> peer_pb2.QuotaAsk:
        more = max(tenant.demand[1], tenant.demand[2]) * _CHUNK_SECONDS
        return peer_pb2.QuotaAsk(
            tenant=tenant.name,
            left_requests=max(0.0, tenant.requests) if is_valid else 0.0,
            left_tokens=max(0.0, tenant.tokens) if is_valid else 0.0,
            spent_tokens=tenant.spent,
            requests=need.requests,
            tokens=need.tokens,
            more_requests=0.1 * tenant.quota.requests_per_second if need.requests or need.tokens else 0.0,
            more_tokens=more if need.requests or need.tokens else 0.0,
            running=tenant.running,
            beginning=need.beginning,
        )

    def _last_refusal(self, tenant: TenantQuota, need: QuotaNeed) -> peer_pb2.QuotaLoan | None:
        """The last refusal if it has just been made for no more than this."""
        if tenant.refusal is None:
            return None
        until, refused, loan = tenant.refusal
        if self._clock() >= until:
            tenant.refusal = None
        elif all(was <= now for was, now in zip(astuple(refused), astuple(need), strict=True)):
            return loan
        return None

    def _note_demand(self, tenant: TenantQuota, need: QuotaNeed) -> None:
        now, demand = self._clock(), tenant.demand
        if now >= demand[0] + 1.0:
            demand[:] = [now, 0.0, demand[1] if now < demand[0] + 2.0 else 0.0]
        demand[1] += need.tokens

    def _note_spent(self, tenant: TenantQuota, tokens: int) -> None:
        if not tenant.is_limited or not (tokens or tenant.quota.concurrent):
            return
        if self._peers.lends_since(tenant.name) is not None:
            tenant.spent += tokens
            self._use_here(tenant, NOTHING)
            return
        lent = min(tokens, max(0.0, tenant.tokens)) if self._clock() < tenant.expires_at else 0.0
        tenant.tokens -= lent
        tenant.spent += tokens - lent
        tenant.is_told = not tenant.quota.concurrent
        self._unsettled[tenant.name] = tenant

    def _give_back(self, tenant: TenantQuota, tokens: int) -> None:
        since = self._peers.lends_since(tenant.name)
        if since is not None:
            self.ledger.account(tenant.name, since).tokens.give_back(tokens)
        else:
            tenant.tokens += tokens

    def _find(self, name: str) -> TenantQuota:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[name] = self._open(name)
        self._tenants.move_to_end(name)
        return tenant

    def _open(self, name: str) -> TenantQuota:
        quota = self.ledger.quota(name)
        return TenantQuota(name, quota, quota != _NO_QUOTA)

    def _forget_idle(self) -> None:
        """Forgets idle tenants if there are too many, among the least recently seen."""
        for _ in range(_LOOKED_AT):
            if len(self._tenants) < _MOST_TENANTS:
                return
            name, tenant = next(iter(self._tenants.items()))
            if tenant.is_idle:
                del self._tenants[name]
                self._unsettled.pop(name, None)
            else:
                self._tenants.move_to_end(name)
