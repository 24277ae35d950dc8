"""Bounds how much extra work failures may cause: a budget that all requests fill and every retry takes from."""

import time

from router import metrics
from router.config import RetryConfig
from rpc.errors import BatonError


class RetryBudget:
    """A bucket of retries. Each request adds `ratio`; it never refills to less than `floor`, one a second.

    Without it a failing pool gets every request several times, just when it can bear that least.
    """

    def __init__(self, ratio: float, floor: int) -> None:
        self._ratio = ratio
        self._floor = float(floor)
        self._most = 10.0 * floor
        self._left = float(floor)
        self._refilled_at = time.monotonic()

    def earn(self) -> None:
        """Adds what one request earns."""
        self._left = min(self._most, self._left + self._ratio)

    def take(self) -> bool:
        """Takes one retry; false if there is none."""
        self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _refill(self) -> None:
        now = time.monotonic()
        if self._left < self._floor:
            self._left = min(self._floor, self._left + now - self._refilled_at)
        self._refilled_at = now


class Retries:
    """Says whether a request that a worker has failed may be run again."""

    def __init__(self, config: RetryConfig) -> None:
        self._max_attempts = config.max_attempts
        self.wait_seconds = config.wait_seconds
        self._budget = RetryBudget(config.budget_ratio, config.budget_floor)

    def earn(self) -> None:
        """A request begins; it adds to what all may retry."""
        self._budget.earn()

    def allow_prefill(self, error: BatonError, attempts: int) -> None:
        """Raises `error` if a prefill may not be tried again after `attempts`."""
        if attempts >= self._max_attempts or not self._budget.take():
            raise error
        metrics.RETRIES.labels("prefill").inc()

    def allow_encode(self, error: BatonError, attempts: int) -> None:
        """Raises `error` if an encode may not be tried again after `attempts`."""
        if attempts >= self._max_attempts or not self._budget.take():
            raise error
        metrics.RETRIES.labels("encode").inc()

    def allow_decode(self, error: BatonError, attempts: int) -> None:
        """Raises `error` if a decode may not be tried again after `attempts`. Not budgeted: its client has tokens."""
        if attempts >= self._max_attempts:
            raise error
        metrics.RETRIES.labels("decode").inc()
