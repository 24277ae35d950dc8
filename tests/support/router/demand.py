"""A demand for a quota of several routers in virtual time, which moves between them, and the bound of what it gets."""

import random

from support.router.fleets import Fleet

from baton.errors import BatonError
from router.config import QuotaConfig, QuotasConfig

RATE, BURST_SECONDS, ROUTERS, STEP = 100_000.0, 1.0, 8, 0.02
SIZE = 2000  # of each request, in tokens
LEASE_SECONDS = 4.0  # of a router's record in etcd


def fleet(routers: int = ROUTERS, wait_seconds: float = 0.0, **quota: float) -> Fleet:
    """Routers that have known each other for a while."""
    config = QuotaConfig(**{"tokens_per_second": RATE, "burst_seconds": BURST_SECONDS, **quota})  # type: ignore[arg-type]
    made = Fleet(QuotasConfig(default=config), wait_seconds=wait_seconds)
    for number in range(routers):
        made.start(f"r{number}")
    made.clock.advance(5.0)
    return made


def lender(which: Fleet, tenant: str = "acme") -> str:
    """The router that lends a tenant's quota."""
    return next(name for name, one in which.routers.items() if one.peers.lends_since(tenant) is not None)


async def uses(which: Fleet, router: str, tokens: int, tenant: str = "acme") -> bool:
    """True if a prompt is within the quota."""
    try:
        async with which.routers[router].quotas.charge(tenant, tokens):
            return True
    except BatonError:
        return False


class Demand:
    """Requests of 2,000 tokens at 10 of 17 parts on one router, which changes every 20 s."""

    def __init__(self, which: Fleet, load: float, seed: int = 2) -> None:
        self._fleet = which
        self._load = load
        self._chance = random.Random(seed)
        self._time = 0.0
        self.asked = 0
        self.used: list[int] = []  # in each step

    async def run(self, seconds: float) -> None:
        """Sends it for some time, to the routers that run."""
        for _ in range(round(seconds / STEP)):
            used = 0
            live = sorted(name for name, one in self._fleet.routers.items() if not one.is_paused)
            hot = int(self._time // 20) % len(live)
            for number, name in enumerate(live):
                due = self._load * RATE * STEP / SIZE * (10 if number == hot else 1) / (9 + len(live))
                for _ in range(int(due) + (self._chance.random() < due - int(due))):
                    self.asked += SIZE
                    used += SIZE if await uses(self._fleet, name, SIZE) else 0
            self.used.append(used)
            self._fleet.clock.advance(STEP)
            self._time += STEP
            if round(self._time / STEP) % 12 == 0:
                await self._fleet.settle()

    def part(self, seconds: float, load: float = 1.0) -> float:
        """The use in the last seconds, of the quota or of what was asked for."""
        return sum(self.used[-round(seconds / STEP) :]) / (min(1.0, load) * RATE * seconds)

    @property
    def worst(self) -> float:
        """The largest `used - rate * W` of all windows: what a burst would have to explain."""
        worst = excess = 0.0
        for used in self.used:
            excess = max(0.0, excess - RATE * STEP) + used
            worst = max(worst, excess)
        return worst


def assert_bounded(demand: Demand) -> None:
    """In no window more than `rate * W + burst` was used."""
    assert demand.worst <= RATE * BURST_SECONDS + 1e-6
