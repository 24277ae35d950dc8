"""A tenant's quota at one router: its last loan and its demand."""

import asyncio
import math
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
class TenantQuota:
    """A tenant at this router, with what is left of its last loan."""

    name: str
    quota: QuotaConfig
    is_limited: bool
    running: int = 0
    waiting: int = 0  # requests, for a lender or what it lends
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

    def seconds_of(self, need: QuotaNeed) -> float:
        """The time in which the quota allows as much again."""
        requests = need.requests / (self.quota.requests_per_second or math.inf)
        return max(requests, need.tokens / (self.quota.tokens_per_second or math.inf))

    @property
    def is_idle(self) -> bool:
        """True if nothing would be lost with it."""
        return not self.running and not self.waiting and not self.spent and not self.lock.locked()
