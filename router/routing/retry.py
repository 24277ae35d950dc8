"""Bounds the extra work of retries: attempts per request, and a budget that all requests share."""

import asyncio
import random

from baton.errors import BatonError, Draining, InvalidReply, InvalidRequest, Overloaded, Unsupported
from discovery.backoff import Backoff
from engine_protocol.roles import Role
from router.config import RetryConfig
from router.telemetry import metrics
from runtime.clock import monotonic

Stage = Role

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_JITTER = 1.25
_SHORTEST_ANSWER_SECONDS = 2.0


class DoubtedRefusal(InvalidReply):
    """A worker alone refuses a request, and nothing shows that the request is to blame: another one may answer.

    If no other one does, the caller gets the refusal that its other parent is.
    """


class DoubtedRequest(InvalidRequest, DoubtedRefusal):
    """An InvalidRequest that is doubted."""


class DoubtedFeature(Unsupported, DoubtedRefusal):
    """An Unsupported that is doubted."""


class RetryBudget:
    """A token bucket. Each request adds `ratio` of a retry; below `floor` it also refills by one a second.

    Without it a failing pool would get every request several times.
    """

    def __init__(self, ratio: float, floor: int) -> None:
        self._ratio = ratio
        self._floor = float(floor)
        self._most = 10.0 * floor
        self._left = float(floor)
        self._refilled_at = monotonic()

    def earn(self) -> None:
        """Adds the share of one request."""
        self._left = min(self._most, self._left + self._ratio)

    def take(self) -> bool:
        """Takes one retry. Returns false if there is none."""
        self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _refill(self) -> None:
        now = monotonic()
        if self._left < self._floor:
            self._left = min(self._floor, self._left + now - self._refilled_at)
        self._refilled_at = now


class Retries:
    """The retry limits of a router."""

    def __init__(self, config: RetryConfig) -> None:
        self._max_attempts = config.max_attempts
        self.wait_seconds = config.wait_seconds
        self.reattach_seconds = config.reattach_seconds
        self.silence_seconds = config.silence_seconds
        self._answer_seconds = config.answer_seconds
        self._budget = RetryBudget(config.budget_ratio, config.budget_floor)

    def earn(self) -> None:
        """Adds the share of a new request to the budget."""
        self._budget.earn()

    def answer_seconds(self, remaining_seconds: float) -> float:
        """The seconds that an idle worker may take to answer: before the deadline, another one must have time to."""
        return min(self._answer_seconds, max(_SHORTEST_ANSWER_SECONDS, remaining_seconds / 2))

    def attempts(self, stage: Stage) -> "Attempts":
        """The attempts of one request at one stage."""
        return Attempts(stage, self._max_attempts, self._budget)


class Attempts:
    """The attempts of one request at one stage: their number, and the processes that have failed it.

    After a failure call `allow`, `exclude` the process if it is to blame, then `pause`.
    """

    def __init__(self, stage: Stage, max_attempts: int, budget: RetryBudget) -> None:
        self._stage = stage
        self._max_attempts = max_attempts
        self._budget = budget
        self.tried: frozenset[str] = frozenset()  # WorkerRecord.process
        self._failures = 0
        self._refusal: str | None = None  # by the last worker, if that is doubted
        self._backoff: Backoff | None = None  # after the first failure

    @property
    def number(self) -> int:
        """The number of the present attempt, from 1."""
        return self._failures + 1

    @property
    def has_another(self) -> bool:
        """True if the present attempt may fail without failing the request."""
        return self._failures + 1 < self._max_attempts

    def allow(self, error: BatonError, *, has_tokens: bool = False) -> None:
        """Permits another attempt after `error`, or raises it.

        The budget is not charged if the client has tokens already. A draining worker counts as no failure. A refusal
        that a second worker repeats is believed.
        """
        if not isinstance(error, Draining):
            self._failures += 1
            before, self._refusal = self._refusal, error.message if isinstance(error, DoubtedRefusal) else None
            is_repeated = before is not None and before == self._refusal
            if is_repeated or self._failures >= self._max_attempts or not (has_tokens or self._budget.take()):
                raise error
        metrics.RETRIES.labels(self._stage).inc()

    def exclude(self, process: str) -> None:
        """Notes a process that has failed the request, and is not to get it again."""
        self.tried |= {process}

    async def pause(self, error: BatonError, remaining_seconds: float) -> None:
        """Waits before the next attempt. Raises `error` if the pause would exceed the remaining time."""
        if isinstance(error, Draining):
            return
        seconds = self.pause_seconds(error)
        if seconds >= remaining_seconds:
            raise error
        await asyncio.sleep(seconds)

    def pause_seconds(self, error: BatonError) -> float:
        """The next pause: growing, with jitter, and no shorter than an overloaded worker asks for."""
        asked = error.retry_after_seconds if isinstance(error, Overloaded) else 0.0
        if self._backoff is None:
            self._backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        return max(self._backoff.next_seconds(), asked * random.uniform(1.0, _JITTER))
