"""A quota that eight routers share, in virtual time: never more than it allows, and nearly all of it."""

import math
import random
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.router.fleets import Fleet

from baton.errors import BatonError, QuotaExceeded, QuotaUnavailable
from router.admission import ledger
from router.admission import quotas as module
from router.admission.ledger import THIS_ROUTER
from router.config import QuotaConfig, QuotasConfig
from router.peers import membership
from router.telemetry.stats import RequestStats

RATE, BURST_SECONDS, ROUTERS, STEP = 100_000.0, 1.0, 8, 0.02
SIZE = 2000
LEASE_SECONDS = 4.0  # of a router's record in etcd


def fleet(routers: int = ROUTERS, **quota: float) -> Fleet:
    config = QuotaConfig(**{"tokens_per_second": RATE, "burst_seconds": BURST_SECONDS, **quota})  # type: ignore[arg-type]
    made = Fleet(QuotasConfig(default=config))
    for number in range(routers):
        made.start(f"r{number}")
    made.clock.advance(5.0)
    return made


def lender(which: Fleet, tenant: str = "acme") -> str:
    return next(name for name, one in which.routers.items() if one.peers.lends_since(tenant) is not None)


async def uses(which: Fleet, router: str, tokens: int, tenant: str = "acme") -> bool:
    """Whether a prompt is within the quota."""
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
        self.used: list[int] = []

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            used = 0
            live = sorted(self._fleet.routers)
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

    def windows(self, seconds: float) -> Iterator[int]:
        """What was used in each such time."""
        steps = round(seconds / STEP)
        total = sum(self.used[:steps])
        for end in range(steps, len(self.used)):
            yield total
            total += self.used[end] - self.used[end - steps]


def assert_bounded(demand: Demand) -> None:
    for seconds in (0.1, 1.0, 3.0, 10.0, 30.0):
        assert max(demand.windows(seconds)) <= RATE * seconds + RATE * BURST_SECONDS, seconds


@pytest.mark.parametrize("load", [3.0, 0.9])
async def test_eight_routers_use_all_of_a_quota_and_never_more_while_the_demand_moves(load: float) -> None:
    demand = Demand(fleet(), load)
    await demand.run(100.0)
    assert_bounded(demand)
    assert sum(demand.used) >= 0.98 * min(RATE * 100.0, demand.asked)


@pytest.mark.parametrize("load", [3.0, 0.9])
@pytest.mark.parametrize("seed", range(2))
async def test_routers_that_are_killed_cost_no_more_than_two_percent_and_break_no_bound(load: float, seed: int) -> None:
    which, chance = fleet(), random.Random(seed)
    demand, victims = Demand(which, load), random.Random(seed).sample(range(ROUTERS), 3)
    for number in victims:
        await demand.run(20.0 + chance.random())
        which.kill(f"r{number}")
        await demand.run(LEASE_SECONDS)
        which.expire(f"r{number}")
        await demand.run(20.0)
        which.start(f"r{number} again")
    await demand.run(20.0)
    assert_bounded(demand)
    assert sum(demand.used) >= 0.98 * min(RATE * len(demand.used) * STEP, demand.asked)


@pytest.mark.parametrize("load", [3.0, 0.9])
async def test_the_home_itself_may_be_killed_and_its_quota_goes_on_elsewhere(load: float) -> None:
    which = fleet()
    home = next(name for name in which.routers if which.routers[name].peers.home("acme") == "")
    demand = Demand(which, load)
    await demand.run(10.0)
    which.kill(home)
    await demand.run(LEASE_SECONDS)
    away = sum(demand.used[-round(LEASE_SECONDS / STEP) :]) / (RATE * LEASE_SECONDS)
    which.expire(home)
    await demand.run(20.0)
    assert_bounded(demand)
    after = sum(demand.used[-round(15.0 / STEP) :]) / (RATE * 15.0)
    assert away > 0.75, "the seven others have their eighths together, wherever the demand is"
    # Below the quota an empty bucket fills by the difference alone.
    assert after > (0.98 if load > 1 else 0.95 * load)


@pytest.mark.parametrize("flaps", ["the home", "another"])
async def test_registrations_that_flap_add_no_more_than_the_part_of_a_router_that_is_cut_off(flaps: str) -> None:
    which = fleet()
    home = next(name for name in which.routers if which.routers[name].peers.home("acme") == "")
    name = home if flaps == "the home" else next(each for each in which.routers if each != home)
    demand = Demand(which, 3.0)
    for _ in range(30):
        await demand.run(1.0)
        which.expire(name)
        await demand.run(0.5)
        which.registered.append(name)
        which.see()
    for seconds in (0.1, 1.0, 3.0, 10.0, 30.0):
        cut_off = (seconds / 3 + 0.5) / ROUTERS
        assert max(demand.windows(seconds)) <= RATE * (seconds + BURST_SECONDS + cut_off), seconds
    assert sum(demand.used) >= 0.9 * RATE * 45.0


async def test_a_home_that_cannot_be_reached_leaves_each_router_its_part_for_a_while_and_then_refuses() -> None:
    which = fleet(2, tokens_per_second=100, burst_seconds=10)
    here, home = _borrower_and_home(which)
    which.clock.advance(100)
    assert await uses(which, here, 10)
    which.cut.add((here, home))
    which.clock.advance(2.0)
    assert not await uses(which, here, 100)
    which.clock.advance(10.0)
    assert await uses(which, here, 500)
    assert not await uses(which, here, 100)
    which.clock.advance(10.0)
    with pytest.raises(QuotaUnavailable, match="acme"):
        async with which.routers[here].quotas.charge("acme", 1):
            pass
    which.cut.clear()
    which.clock.advance(1.0)
    assert await uses(which, here, 100)


async def test_routers_that_cannot_reach_a_home_share_their_parts_and_get_no_more_than_these() -> None:
    """All demand is at one of them, and the home still lends what is left to the others."""
    which = fleet(4, tokens_per_second=1000, burst_seconds=1)
    home = next(name for name in which.routers if which.routers[name].peers.home("acme") == "")
    cut_off = [name for name in which.routers if name != home][:2]
    which.cut = {(name, home) for name in cut_off}
    used = 0
    for number in range(500):
        used += 50 if await uses(which, cut_off[0], 50) else 0
        if number % 10 == 0:  # so that it is known to be cut off
            used += 1 if await uses(which, cut_off[1], 1) else 0
        which.clock.advance(0.02)
        await which.settle()
    assert 0.9 * 5000 <= used <= 5000, "two fourths for ten seconds, though nearly all demand is at one"


async def test_parts_that_nobody_used_for_an_outage_are_no_burst_in_the_next_one() -> None:
    which = fleet(2, tokens_per_second=1000, burst_seconds=10)
    here, home = _borrower_and_home(which)
    which.cut.add((here, home))
    await uses(which, here, 1)
    which.cut.clear()
    which.clock.advance(5.0)
    assert await uses(which, here, 1)
    which.clock.advance(5.0)
    which.cut.add((here, home))
    assert not await uses(which, here, 100)


async def test_a_router_that_reaches_the_next_home_late_gets_no_second_part_for_the_time_before() -> None:
    """Of two outages: the next home has lent in the first one."""
    which = fleet(3, tokens_per_second=300, burst_seconds=10)
    here, home, following = _with_next_home(which)
    which.cut = {(here, home)}
    await uses(which, here, 1)
    which.cut.clear()
    which.clock.advance(60.0)
    await uses(which, here, 1)
    which.clock.advance(60.0)
    which.cut = {(here, home), (here, following)}
    used = 0
    for number in range(104):
        if number == 80:
            which.cut.remove((here, following))
        used += 100 if await uses(which, here, 100) else 0
        which.clock.advance(0.125)
    assert 1000 <= used <= 1300, "a third, for thirteen seconds"


async def test_a_refusal_of_the_next_home_is_repeated_without_asking() -> None:
    which = fleet(3, tokens_per_second=300, burst_seconds=10)
    here, home, following = _with_next_home(which)
    which.cut = {(here, home)}
    for _ in range(2):
        with pytest.raises(QuotaExceeded, match="the rate of tokens is exceeded"):
            async with which.routers[here].quotas.charge("acme", 100):
                pass
        which.cut.add((here, following))


@pytest.mark.parametrize("reaches_next", [True, False])
async def test_what_large_prompts_owe_while_a_home_is_away_refuses_no_request_by_itself(*, reaches_next: bool) -> None:
    which = fleet(3, tokens_per_second=300, burst_seconds=1)
    here, home, following = _with_next_home(which)
    which.cut = {(here, home)} if reaches_next else {(here, home), (here, following)}
    assert not await uses(which, here, 1000)
    which.clock.advance(2.0)
    assert await uses(which, here, 1000)
    assert not await uses(which, here, 1)
    which.clock.advance(0.1)
    async with which.routers[here].quotas.track("acme", RequestStats("r1")):
        pass


async def test_the_next_home_of_a_tenant_is_chosen_once_for_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand asks come in one message, and to choose takes longer the more routers there are."""
    chosen: list[str] = []
    monkeypatch.setattr(membership, "_score", lambda key, router: chosen.append(router) or router.encode())
    which = fleet(3)
    here, home, _ = _with_next_home(which)
    which.cut = {(here, home)}
    await uses(which, here, 1)
    chosen.clear()
    for _ in range(10):
        which.clock.advance(0.1)
        await uses(which, here, 1)
    assert not chosen
    which.routers[here].peers.next_home("other")
    assert chosen == ["r0", "r1", "r2"]


async def test_a_home_that_cannot_be_reached_for_long_may_be_configured_to_allow_all() -> None:
    which = Fleet(QuotasConfig(default=QuotaConfig(tokens_per_second=1), unreachable="allow", unreachable_seconds=5))
    which.start("r0")
    which.start("r1")
    here, home = _borrower_and_home(which)
    which.cut.add((here, home))
    assert not await uses(which, here, 1000)
    which.clock.advance(6.0)
    assert await uses(which, here, 1000)


async def test_what_a_router_has_borrowed_and_does_not_use_is_there_again_after_a_second() -> None:
    which = fleet(2, tokens_per_second=1000, burst_seconds=1)
    here, home = _borrower_and_home(which)
    which.clock.advance(100)
    for _ in range(4):
        assert await uses(which, here, 100)
    assert which.routers[here].quotas._tenants["acme"].tokens > 0
    bucket = which.routers[home].quotas.ledger.account("acme", -math.inf).tokens
    which.kill(here)  # it gives nothing back
    for seconds, is_full in ((0.9, False), (0.2, False), (0.5, True)):
        which.clock.advance(seconds)
        await uses(which, home, 0)
        assert (bucket.level >= 999.9) is is_full, seconds


async def test_a_loan_that_has_expired_is_not_used() -> None:
    which = fleet(2, tokens_per_second=1000, burst_seconds=1)
    here, home = _borrower_and_home(which)
    which.clock.advance(100)
    for _ in range(4):
        assert await uses(which, here, 100)
    lent = which.routers[here].quotas._tenants["acme"].tokens
    which.cut.add((here, home))
    which.clock.advance(1.0)
    assert not await uses(which, here, int(lent) or 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("burst_seconds", [0.2, 1.0])
async def test_prompts_as_large_as_the_burst_break_the_bound_by_no_more_than_one_of_them(
    burst_seconds: float, seed: int
) -> None:
    rate, chance, used = 1000.0, random.Random(seed), list[tuple[float, int]]()
    which, largest = fleet(4, tokens_per_second=rate, burst_seconds=burst_seconds), int(rate * burst_seconds)
    for number in range(2000):
        tokens = chance.choice([1, largest // 10, largest // 2, largest])
        if await uses(which, f"r{chance.randrange(4)}", tokens):
            used.append((which.clock(), tokens))
        which.clock.advance(2.0 if number % 500 == 0 else chance.choice([0.0, 0.001, 0.02]))
        if number % 10 == 0:
            await which.settle()
    for first, (start, _) in enumerate(used):
        total = 0
        for at, tokens in used[first : first + 200]:
            total += tokens
            assert total <= rate * (at - start) + 2 * largest + 1e-6


@pytest.mark.parametrize("sizes", [(10,), (400,), (10, 400), (10, 400, 2000)])
async def test_requests_and_tokens_are_bounded_together_whatever_the_sizes_are(sizes: tuple[int, ...]) -> None:
    """Small prompts run out of requests, large ones of tokens; both bounds hold for each."""
    requests_rate, seconds = 50.0, 6.0
    which, chance = fleet(4, tokens_per_second=10_000.0, requests_per_second=requests_rate), random.Random(4)
    used: list[tuple[float, int]] = []
    begin = which.clock()
    while which.clock() < begin + seconds:
        for router in which.routers.values():
            tokens = chance.choice(sizes)
            with suppress(BatonError):
                async with router.quotas.track("acme", RequestStats("r")), router.quotas.charge("acme", tokens):
                    used.append((which.clock(), tokens))
        which.clock.advance(0.02)
        await which.settle()
    for window in (0.1, 1.0, 5.0):
        for start in {at for at, _ in used}:
            inside = [tokens for at, tokens in used if start <= at <= start + window]
            assert len(inside) <= requests_rate * (window + BURST_SECONDS)
            assert sum(inside) <= 10_000.0 * (window + BURST_SECONDS)
    parts = (len(used) / (requests_rate * seconds), sum(tokens for _, tokens in used) / (10_000.0 * seconds))
    assert max(parts) >= 0.9 or len(sizes) > 1


async def test_answers_are_charged_at_the_home_and_make_other_routers_wait() -> None:
    which = fleet(2, tokens_per_second=100, burst_seconds=10)
    here, home = _borrower_and_home(which)
    which.clock.advance(100)
    async with which.routers[here].quotas.track("acme", stats := RequestStats("r")):
        stats.completion_tokens = 1500
    await which.settle()
    with pytest.raises(QuotaExceeded) as refused:
        async with which.routers[home].quotas.charge("acme", 100):
            pass
    assert refused.value.subject == "acme"
    assert refused.value.retry_after_seconds == pytest.approx(6.0, abs=0.5)


async def test_as_many_requests_run_at_all_routers_as_may() -> None:
    which = fleet(3, tokens_per_second=0, concurrent=2)
    async with which.routers["r0"].quotas.track("acme", RequestStats("a")):
        async with which.routers["r1"].quotas.track("acme", RequestStats("b")):
            for _ in range(5):
                which.clock.advance(1.5)
                await which.settle()
            for name in which.routers:
                with pytest.raises(QuotaExceeded, match="as many requests"):
                    async with which.routers[name].quotas.track("acme", RequestStats("c")):
                        pass
        await which.settle()
        which.clock.advance(0.1)
        async with which.routers["r2"].quotas.track("acme", RequestStats("d")):
            pass


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_becomes_of_requests_nothing_is_left_running_and_memory_is_bounded(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_TENANTS", 100)
    monkeypatch.setattr(ledger, "_MOST_TENANTS", 100)
    which, chance = fleet(3, tokens_per_second=1000, requests_per_second=50, concurrent=3), random.Random(seed)
    names = list(which.routers)
    for number in range(3000):
        quotas = which.routers[chance.choice(names)].quotas
        tenant, stats = f"t{chance.randint(0, 20 if number % 2 else 100_000)}", RequestStats("r")
        which.cut = {(chance.choice(names), chance.choice(names))} if chance.random() < 0.3 else set()
        try:
            async with quotas.track(tenant, stats), quotas.charge(tenant, chance.randint(0, 500)):
                stats.completion_tokens = chance.randint(0, 500)
                if chance.random() < 0.5:
                    raise ValueError
        except (BatonError, ValueError):
            pass
        which.clock.advance(chance.random() * 0.1)
        if chance.random() < 0.1:
            await which.settle()
    which.cut.clear()
    for _ in range(30):
        which.clock.advance(1.0)
        await which.settle()
    for router in which.routers.values():
        assert router.quotas.remembered <= 201
        assert all((tenant.running, tenant.spent) == (0, 0.0) for tenant in router.quotas._tenants.values())
        assert not router.quotas._running
        assert not router.quotas._unsettled
        for account in router.quotas.ledger._accounts.values():
            assert sum(there.count for there in account.running.values()) == 0


def _with_next_home(which: Fleet) -> tuple[str, str, str]:
    """A router that borrows, the home, and the router that would be the home next; of three."""
    home = next(name for name in which.routers if which.routers[name].peers.home("acme") == THIS_ROUTER)
    following = which.routers[home].peers.next_home("acme")
    return next(name for name in which.routers if name not in (home, following)), home, following


def _borrower_and_home(which: Fleet) -> tuple[str, str]:
    return ("r1", "r0") if which.routers["r0"].peers.home("acme") == "" else ("r0", "r1")
