"""A tenant's quota at one router: its last loan and its demand."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.engine.v1 import peer_pb2
from router.config import QuotaConfig


@dataclass(frozen=True, slots=True)
class QuotaNeed:
    """The units that a request uses at once."""

    requests: int = 0
    tokens: int = 0
    beginning: int = 0


NOTHING = QuotaNeed()


@dataclass(slots=True, eq=False)
class WaitQueue:
    """Requests of one tenant that need the same kind of quota: first come, first served."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the first one, until it has got or not got it
    length: int = 0
    refusal: peer_pb2.QuotaLoan | None = None  # of the first one, while it waits for a bucket to fill
    refills_from: float = 0.0  # when what the bucket gets begins to be theirs, one after the other
    joined_seconds: float = 0.0  # in which the quota allows what they need, and those that were before them
    left_seconds: float = 0.0  # of the latter

    @contextmanager
    def join(self, seconds: float) -> Iterator[float]:
        """Counts a request while the context is open, whose need takes the quota so many seconds. Yields its end."""
        self.length += 1
        self.joined_seconds += seconds
        try:
            yield self.joined_seconds
        finally:
            self.length -= 1
            self.left_seconds += seconds
            if not self.length:
                self.joined_seconds = self.left_seconds = 0.0

    def served_at(self, end: float) -> float:
        """The time at which the bucket has enough for those up to an end."""
        return self.refills_from + end - self.left_seconds


@dataclass(slots=True, eq=False)
class TenantQuota:
    """A tenant at this router, with what is left of its last loan."""

    name: str
    quota: QuotaConfig
    is_limited: bool
    running: int = 0
    to_begin: WaitQueue = field(default_factory=WaitQueue)
    to_prefill: WaitQueue = field(default_factory=WaitQueue)  # which need tokens
    requests: float = 0.0
    tokens: float = 0.0
    expires_at: float = 0.0
    spent: float = 0.0  # tokens beyond the loan, of which the home has not heard
    is_told: bool = True  # whether the home knows how many requests run
    demand: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # began, tokens since and in the second before
    away_since: float = 0.0  # since when no router has lent, as far as was asked
    away_at: float = -math.inf  # when that was found last
    unlent_at: float = -math.inf  # when all that may lend were asked last, and none did
    refusal: tuple[float, QuotaNeed, peer_pb2.QuotaLoan] | None = None  # until when it is repeated
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def queue(self, need: QuotaNeed) -> WaitQueue:
        """The requests that wait for such a need."""
        return self.to_prefill if need.tokens else self.to_begin

    def seconds_of(self, need: QuotaNeed) -> float:
        """The time in which the quota allows as much again."""
        requests = need.requests / (self.quota.requests_per_second or math.inf)
        return max(requests, need.tokens / (self.quota.tokens_per_second or math.inf))

    @property
    def is_unlent(self) -> bool:
        """True if no router lent this quota when it was last asked for."""
        return self.away_at > -math.inf

    @property
    def is_idle(self) -> bool:
        """True if nothing would be lost with it."""
        is_waited_for = self.to_begin.length or self.to_prefill.length or self.lock.locked()
        return not (self.running or self.spent or is_waited_for)
