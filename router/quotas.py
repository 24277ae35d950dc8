"""What each tenant may use: buckets of requests and tokens that fill with time, and requests at once."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from router import metrics
from router.account import Account
from router.config import QuotaConfig, QuotasConfig
from rpc.errors import QuotaExceeded

# So many tenants are remembered before those are forgotten that owe nothing: anybody can make up names.
_MOST_TENANTS = 10_000

_BUSY_SECONDS = 1.0  # when to come back if too many run: nobody knows when one ends


class Bucket:
    """Fills by `rate` a second up to `size`. A rate of 0 is no limit."""

    def __init__(self, rate: float, burst_seconds: float) -> None:
        self._rate = rate
        self._size = max(1.0, rate * burst_seconds)
        self._level = self._size
        self._filled_at = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether nothing is owed to it."""
        self._fill()
        return not self._rate or self._level >= self._size

    def lacks_seconds(self, amount: float) -> float:
        """How long until `amount` can be taken; 0 if now. More than it holds can be taken once it is full."""
        if not self._rate:
            return 0.0
        self._fill()
        return max(0.0, (min(amount, self._size) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Takes, also what is not there: it is owed, and the next ones wait for it."""
        if self._rate:
            self._fill()
            self._level -= amount

    def _fill(self) -> None:
        now = time.monotonic()
        self._level = min(self._size, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now


class _Tenant:
    def __init__(self, quota: QuotaConfig) -> None:
        self.concurrent = quota.concurrent
        self.requests = Bucket(quota.requests_per_second, quota.burst_seconds)
        self.tokens = Bucket(quota.tokens_per_second, quota.burst_seconds)
        self.running = 0

    @property
    def is_idle(self) -> bool:
        return not self.running and self.requests.is_full and self.tokens.is_full


class Quotas:
    """All tenants' quotas."""

    def __init__(self, config: QuotasConfig) -> None:
        self._config = config
        self._tenants: dict[str, _Tenant] = {}
        self._is_unlimited = config == QuotasConfig()

    def serving(self, name: str, account: Account) -> AbstractContextManager[None]:
        """Counts a request of a tenant, and in the end the tokens that were generated for it. Raises QuotaExceeded."""
        return nullcontext() if self._is_unlimited else self._serving(name, account)

    @contextmanager
    def _serving(self, name: str, account: Account) -> Iterator[None]:
        tenant = self._find(name)
        if 0 < tenant.concurrent <= tenant.running:
            raise _exceeded(name, f"{tenant.running} requests run, which is all", _BUSY_SECONDS)
        if lacking := tenant.requests.lacks_seconds(1):
            raise _exceeded(name, "no more requests now", lacking)
        tenant.requests.take(1)
        tenant.running += 1
        try:
            yield
        finally:
            tenant.running -= 1
            tenant.tokens.take(len(account.token_ids))

    def charge(self, name: str, prompt_tokens: int) -> None:
        """Takes a prompt's tokens. Raises QuotaExceeded if that many are not there."""
        if self._is_unlimited:
            return
        tenant = self._find(name)
        if lacking := tenant.tokens.lacks_seconds(prompt_tokens):
            raise _exceeded(name, f"no {prompt_tokens} more tokens now", lacking)
        tenant.tokens.take(prompt_tokens)

    def _find(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MOST_TENANTS:
                self._tenants = {each: kept for each, kept in self._tenants.items() if not kept.is_idle}
            tenant = self._tenants[name] = _Tenant(self._config.tenants.get(name, self._config.default))
        return tenant


def _exceeded(name: str, why: str, retry_after_seconds: float) -> QuotaExceeded:
    metrics.REFUSALS.labels(QuotaExceeded.reason).inc()
    subject = name or "default"
    return QuotaExceeded(f"tenant {subject}: {why}", subject=subject, retry_after_seconds=retry_after_seconds)
