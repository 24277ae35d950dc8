"""The loans of this router as the home of tenants: their buckets of requests and tokens, and their running requests.

A bucket's level and what it has lent never exceed its size together, so that all routers use at most `rate * W + size`
in any time W. What is lent and not given back within a second counts as used.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from baton.engine.v1 import peer_pb2
from router.config import QuotaConfig, QuotasConfig
from router.routing.latency import Clock
from runtime.clock import monotonic

THIS_ROUTER = ""  # as a borrower and as a home
LOAN_SECONDS = 1.0  # then an unused loan expires at its borrower
# Later than there, since a loan is counted from its arrival here.
_FORGOTTEN_SECONDS = LOAN_SECONDS
_RUNNING_SECONDS = 5.0  # for which a router's number of running requests counts without another ask
# Beyond this number idle tenants are forgotten, and beyond twice as many all that have no request running.
_MOST_TENANTS = 10_000
_LOOKED_AT = 4  # how many are examined for each new tenant, which bounds the cost of one request
_MOST_SPENT = 2.0**24  # tokens, of one ask
# For which requests wait for a bucket that began empty: a demand of 0.9 of its rate has then caught up with a second.
_EMPTY_SECONDS = 10.0
_BUSY_SECONDS = 1.0  # the advice to retry when too many requests run
# Of its rate, which a router may give back in a second: one that lies about it gets no more beside its loans.
_RETURNABLE_SECONDS = 2.0
_NOTHING_LEFT = peer_pb2.QuotaAsk()
_GRANTED = peer_pb2.QuotaLoan(granted=True)


class TokenBucket:
    """A token bucket: fills by `rate` a second, up to `burst_seconds` of it. A rate of 0 is no limit."""

    def __init__(self, rate: float, burst_seconds: float, clock: Clock = monotonic) -> None:
        self.rate = rate
        self._clock = clock
        self.size = max(1.0, rate * burst_seconds)
        self._level = self.size
        self._lent = 0.0
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """The units that can be taken now."""
        self._fill()
        return self._level

    @property
    def is_full(self) -> bool:
        """True if it is filled to its size."""
        return not self.rate or self.level >= self.size

    def limit(self, since: float) -> None:
        """Keeps no more than if it had been empty at that time."""
        if self.rate:
            self._fill()
            self._level = min(self._level, max(0.0, self._filled_at - since) * self.rate)

    def lacks_seconds(self, amount: float) -> float:
        """The time until `amount` can be taken: none for nothing, also of what is owed. An amount above the size can be
        taken from a full bucket.
        """
        if not self.rate or not amount:
            return 0.0
        return max(0.0, (min(amount, self._capacity) - self.level) / self.rate)

    def take(self, amount: float) -> None:
        """Takes an amount. The level may become negative, and later requests wait for it to fill."""
        if self.rate:
            self._fill()
            self._level -= amount

    def give_back(self, amount: float) -> None:
        """Undoes a `take`."""
        if self.rate:
            self._fill()
            self._level = min(self._capacity, self._level + amount)

    def lend(self, amount: float, more: float) -> float:
        """Takes an amount, and of `more` what there is. Returns how much more it was. See `end_loan`."""
        if not self.rate:
            return more
        self.take(amount)
        more = max(0.0, min(more, self._level, 0.1 * self.rate))
        self._level -= more
        self._lent += amount + more
        return more

    def end_loan(self, lent: float, left: float) -> None:
        """Takes back what is left of a loan."""
        if self.rate:
            self._fill()
            self._lent = max(0.0, self._lent - lent)
            self.give_back(left)

    @property
    def _capacity(self) -> float:
        return max(1.0, self.size - self._lent)

    def _fill(self) -> None:
        now = self._clock()
        if now > self._filled_at:
            self._level = min(max(self._capacity, self._level), self._level + (now - self._filled_at) * self.rate)
            self._filled_at = now


@dataclass(slots=True)
class _Loan:
    requests: float
    tokens: float
    at: float
    returnable: float  # for how many seconds of the rate the borrower may still give back


@dataclass(slots=True)
class _Running:
    count: int
    at: float


@dataclass(slots=True, eq=False)
class Account:
    """A tenant's quota at its home."""

    requests: TokenBucket
    tokens: TokenBucket
    concurrent: int
    since: float  # when this router became the home, or before
    loans: dict[str, _Loan] = field(default_factory=dict)  # by router
    running: dict[str, _Running] = field(default_factory=dict)  # by router

    @property
    def is_idle(self) -> bool:
        """True if forgetting it changes nothing."""
        return not self.running and not self.loans and self.requests.is_full and self.tokens.is_full

    def settle(self, borrower: str, ask: peer_pb2.QuotaAsk, now: float) -> float:
        """Ends the loans that are over, and this router's last one. Returns what it may give back of the next one."""
        returnable = _RETURNABLE_SECONDS
        for name, loan in list(self.loans.items()):
            if name == borrower:
                returnable = min(returnable, loan.returnable + _RETURNABLE_SECONDS * (now - loan.at))
                returnable -= self._end(loan, ask, returnable)
            elif now > loan.at + _FORGOTTEN_SECONDS:
                self._end(loan, _NOTHING_LEFT, 0.0)
            else:
                continue
            del self.loans[name]
        self.tokens.take(min(_MOST_SPENT, ask.spent_tokens))
        for name, there in list(self.running.items()):
            if now > there.at + _RUNNING_SECONDS:
                del self.running[name]
        self._note_running(borrower, ask.running, now)
        return returnable

    def _end(self, loan: _Loan, ask: peer_pb2.QuotaAsk, returnable: float) -> float:
        """Takes back what is left of a loan. Returns how many seconds of the rate that was."""
        requests = min(ask.left_requests, loan.requests, self.requests.rate * returnable)
        tokens = min(ask.left_tokens, loan.tokens, self.tokens.rate * returnable)
        self.requests.end_loan(loan.requests, requests)
        self.tokens.end_loan(loan.tokens, tokens)
        return max(requests / (self.requests.rate or 1.0), tokens / (self.tokens.rate or 1.0))

    def lend(self, borrower: str, ask: peer_pb2.QuotaAsk, now: float, returnable: float) -> peer_pb2.QuotaLoan:
        """Lends what is asked for, or says what there is too little of. After `settle`."""
        running = sum(there.count for there in self.running.values())
        if ask.beginning and self.concurrent and running + ask.beginning > self.concurrent:
            return _refusal(peer_pb2.QUOTA_KIND_CONCURRENT, _BUSY_SECONDS)
        began_empty = now < self.since + _EMPTY_SECONDS
        if lacking := self.requests.lacks_seconds(ask.requests):
            return _refusal(peer_pb2.QUOTA_KIND_REQUESTS, lacking, began_empty=began_empty)
        if lacking := self.tokens.lacks_seconds(ask.tokens):
            return _refusal(peer_pb2.QUOTA_KIND_TOKENS, lacking, began_empty=began_empty)
        self._note_running(borrower, ask.running + ask.beginning, now)
        if borrower == THIS_ROUTER:
            self.requests.take(ask.requests)
            self.tokens.take(ask.tokens)
            return _GRANTED
        requests = self.requests.lend(ask.requests, ask.more_requests)
        tokens = self.tokens.lend(ask.tokens, ask.more_tokens)
        self.loans[borrower] = _Loan(ask.requests + requests, ask.tokens + tokens, now, returnable)
        return peer_pb2.QuotaLoan(granted=True, more_requests=requests, more_tokens=tokens)

    def _note_running(self, borrower: str, count: int, now: float) -> None:
        if count and self.concurrent:
            self.running[borrower] = _Running(count, now)
        else:
            self.running.pop(borrower, None)


class Ledger:
    """The accounts of the tenants whose home is this router."""

    def __init__(self, config: QuotasConfig, clock: Clock = monotonic) -> None:
        self._config = config
        self._clock = clock
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # least recently used first

    @property
    def remembered(self) -> int:
        """The number of accounts."""
        return len(self._accounts)

    def quota(self, tenant: str) -> QuotaConfig:
        """The configured quota of a tenant."""
        return self._config.tenants.get(tenant, self._config.default)

    def lend(self, borrower: str, ask: peer_pb2.QuotaAsk, home_since: float) -> peer_pb2.QuotaLoan:
        """Answers an ask of a router, whose numbers must be finite and at least 0."""
        account, now = self.account(ask.tenant, home_since), self._clock()
        returnable = account.settle(borrower, ask, now)
        if not (ask.requests or ask.tokens or ask.beginning):
            return _GRANTED
        return account.lend(borrower, ask, now, returnable)

    def account(self, tenant: str, home_since: float) -> Account:
        """A tenant's account. It begins empty when this router becomes the home, since the last home's is unknown."""
        account = self._accounts.get(tenant)
        if account is None:
            self._forget()
            account = self._accounts[tenant] = self._open(tenant, home_since)
        elif account.since < home_since:
            # It may have lent since then, too: what is left of that is no more than before.
            account.since = home_since
            account.requests.limit(home_since)
            account.tokens.limit(home_since)
        self._accounts.move_to_end(tenant)
        return account

    def known(self, tenant: str) -> Account | None:
        """A tenant's account if there is one."""
        return self._accounts.get(tenant)

    def _open(self, tenant: str, home_since: float) -> Account:
        quota, clock = self.quota(tenant), self._clock
        requests = TokenBucket(quota.requests_per_second, quota.burst_seconds, clock)
        tokens = TokenBucket(quota.tokens_per_second, quota.burst_seconds, clock)
        requests.limit(home_since)
        tokens.limit(home_since)
        return Account(requests, tokens, quota.concurrent, home_since)

    def _forget(self) -> None:
        """Forgets accounts if there are too many, among the least recently used."""
        for _ in range(_LOOKED_AT):
            count = len(self._accounts)
            if count < _MOST_TENANTS:
                return
            name, account = next(iter(self._accounts.items()))
            if account.is_idle or (count >= 2 * _MOST_TENANTS and not account.running):
                del self._accounts[name]
            else:
                self._accounts.move_to_end(name)


def _refusal(kind: "peer_pb2.QuotaKind.ValueType", seconds: float, *, began_empty: bool = False) -> peer_pb2.QuotaLoan:
    refusal = peer_pb2.QuotaLoan(exceeded=kind, began_empty=began_empty)
    refusal.retry_after.FromNanoseconds(int(seconds * 1e9))
    return refusal
