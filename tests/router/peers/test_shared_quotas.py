"""A quota that eight routers share, in virtual time: never more than it allows, and nearly all of it."""

import math
import random
from contextlib import suppress

import pytest
from support.router.demand import BURST_SECONDS, RATE, Demand, assert_bounded, fleet, uses
from support.router.fleets import Fleet

from baton.errors import BatonError, QuotaExceeded
from router.admission import ledger
from router.admission import quotas as module
from router.config import QuotaConfig, QuotasConfig
from router.telemetry.stats import RequestStats


@pytest.mark.parametrize("load", [3.0, 0.9])
async def test_eight_routers_use_all_of_a_quota_and_never_more_while_the_demand_moves(load: float) -> None:
    demand = Demand(fleet(), load)
    await demand.run(100.0)
    assert_bounded(demand)
    assert sum(demand.used) >= 0.98 * min(RATE * 100.0, demand.asked)


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


def _borrower_and_home(which: Fleet) -> tuple[str, str]:
    return ("r1", "r0") if which.routers["r0"].peers.home("acme") == "" else ("r0", "r1")
