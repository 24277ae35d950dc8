"""Quotas of tenants: token buckets for requests and tokens, and a limit on concurrent requests."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from baton.errors import QuotaExceeded
from router.config import QuotaConfig, QuotasConfig
from router.routing.latency import Clock
from router.telemetry import metrics
from router.telemetry.stats import RequestStats

# Beyond this number tenants without debts are forgotten, since anyone can make up names.
_MOST_TENANTS = 10_000
# How many are examined for each new tenant, which bounds the cost of one request.
_LOOKED_AT = 4

_BUSY_SECONDS = 1.0  # the advice to retry when too many requests run


class TokenBucket:
    """A token bucket: fills by `rate` a second, up to `burst_seconds` of it. A rate of 0 is no limit."""

    def __init__(self, rate: float, burst_seconds: float, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._size = max(1.0, rate * burst_seconds)
        self._level = self._size
        self._filled_at = clock()

    @property
    def is_full(self) -> bool:
        """Whether it is filled to its size."""
        self._fill()
        return not self._rate or self._level >= self._size

    def lacks_seconds(self, amount: float) -> float:
        """The time until `amount` can be taken. An amount above the size can be taken from a full bucket."""
        if not self._rate:
            return 0.0
        self._fill()
        return max(0.0, (min(amount, self._size) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Takes an amount. The level may become negative, and later requests wait for it to fill."""
        if self._rate:
            self._fill()
            self._level -= amount

    def give_back(self, amount: float) -> None:
        """Undoes a `take`."""
        if self._rate:
            self._fill()
            self._level = min(self._size, self._level + amount)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._size, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now


class _Tenant:
    def __init__(self, quota: QuotaConfig, clock: Clock) -> None:
        self.concurrent = quota.concurrent
        self.requests = TokenBucket(quota.requests_per_second, quota.burst_seconds, clock)
        self.tokens = TokenBucket(quota.tokens_per_second, quota.burst_seconds, clock)
        self.running = 0

    @property
    def is_idle(self) -> bool:
        return not self.running and self.requests.is_full and self.tokens.is_full


class Quotas:
    """The quotas of all tenants."""

    def __init__(self, config: QuotasConfig, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # least recently seen first
        self.is_unlimited = config == QuotasConfig()  # for every tenant

    @property
    def remembered(self) -> int:
        """The number of remembered tenants."""
        return len(self._tenants)

    def track(self, name: str, stats: RequestStats) -> AbstractContextManager[None]:
        """Counts a request of a tenant, and at its end the generated tokens. Raises QuotaExceeded."""
        return nullcontext() if self.is_unlimited else self._track(name, stats)

    @contextmanager
    def _track(self, name: str, stats: RequestStats) -> Iterator[None]:
        tenant = self._find(name)
        if 0 < tenant.concurrent <= tenant.running:
            raise _exceeded(name, f"{tenant.running} requests are running, which is the limit", _BUSY_SECONDS)
        if lacking := tenant.requests.lacks_seconds(1):
            raise _exceeded(name, "the rate of requests is exceeded", lacking)
        tenant.requests.take(1)
        tenant.running += 1
        try:
            yield
        finally:
            tenant.running -= 1
            tenant.tokens.take(stats.completion_tokens)

    def charge(self, name: str, prompt_tokens: int) -> AbstractContextManager[None]:
        """Takes a prompt's tokens, and gives them back if the body fails. Raises QuotaExceeded."""
        return nullcontext() if self.is_unlimited else self._charge(name, prompt_tokens)

    @contextmanager
    def _charge(self, name: str, prompt_tokens: int) -> Iterator[None]:
        tenant = self._find(name)
        if lacking := tenant.tokens.lacks_seconds(prompt_tokens):
            raise _exceeded(name, f"the rate of tokens is exceeded by a prompt of {prompt_tokens}", lacking)
        tenant.tokens.take(prompt_tokens)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                tenant.tokens.give_back(prompt_tokens)

    def _find(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_idle()
            quota = self._config.tenants.get(name, self._config.default)
            tenant = self._tenants[name] = _Tenant(quota, self._clock)
        self._tenants.move_to_end(name)
        return tenant

    def _forget_idle(self) -> None:
        """Forgets idle tenants if there are too many, among the least recently seen."""
        for _ in range(_LOOKED_AT):
            if len(self._tenants) < _MOST_TENANTS:
                return
            name, tenant = next(iter(self._tenants.items()))
            if tenant.is_idle:
                del self._tenants[name]
            else:
                self._tenants.move_to_end(name)


def _exceeded(name: str, why: str, retry_after_seconds: float) -> QuotaExceeded:
    metrics.REFUSALS.labels(QuotaExceeded.reason).inc()
    subject = name or "default"
    return QuotaExceeded(f"tenant {subject}: {why}", subject=subject, retry_after_seconds=retry_after_seconds)
