"""Requests that wait for a quota: served when it is lent, refused if they cannot be in time, and told what is true."""

import asyncio

import pytest
from support.router.contexts import request_context
from support.router.demand import fleet, lender
from support.router.fleets import Fleet

from baton.errors import QuotaExceeded, QuotaUnavailable


def without_lender(**quota: float) -> tuple[Fleet, str]:
    """Four routers of which the lender has just died, and one that will not be the next."""
    which = fleet(4, wait_seconds=2.0, **quota)
    home = lender(which)
    which.kill(home)
    which.expire(home)
    # A trial of the same names: who lends next does not depend on time.
    trial = fleet(4)
    trial.kill(home)
    trial.expire(home)
    trial.clock.advance(2.0)
    following = lender(trial)
    return which, next(name for name in which.routers if name != following)


def charge(which: Fleet, name: str, tokens: int, seconds: float = 60.0) -> "asyncio.Task[None]":
    async def charged() -> None:
        async with which.routers[name].quotas.charge("acme", tokens, seconds):
            pass

    return asyncio.create_task(charged())


async def turns(number: int = 50) -> None:
    """Lets all that is due happen, and no time pass."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_a_request_is_served_when_a_promise_changes_and_not_at_its_next_look() -> None:
    which, here = without_lender()
    waiting = charge(which, here, 10)
    await turns()
    assert not waiting.done()
    which.clock.advance(1.5)
    await turns()
    assert waiting.done()
    waiting.result()


async def test_the_wait_for_a_bucket_asks_its_lender_once_and_not_again_and_again() -> None:
    which, here = without_lender(tokens_per_second=100, burst_seconds=10)
    which.clock.advance(1.0)
    home = lender(which)
    before = which.asked[home]
    waiting = charge(which, here, 100)
    await turns()
    assert which.asked[home] == before + 1
    which.clock.advance(2.0)
    await waiting
    assert which.asked[home] == before + 2


async def test_a_bucket_that_fills_after_the_deadline_is_a_refusal_at_once_that_says_when() -> None:
    which, here = without_lender(tokens_per_second=100, burst_seconds=10)
    which.clock.advance(1.0)
    with pytest.raises(QuotaExceeded, match=r"tenant acme: .* a prompt of 150; the router that lends it") as refused:
        await charge(which, here, 150, seconds=0.5)
    assert refused.value.subject == "acme"
    seconds = refused.value.retry_after_seconds
    assert 0.5 < seconds < 1.5
    which.clock.advance(seconds + 0.001)
    await charge(which, here, 150, seconds=0.5)


async def test_a_request_behind_others_is_told_when_the_quota_has_enough_for_all_of_them() -> None:
    which, here = without_lender(tokens_per_second=100, burst_seconds=10)
    which.clock.advance(1.0)
    ahead = [charge(which, here, 60) for _ in range(3)]
    await turns()
    with pytest.raises(QuotaExceeded, match="acme") as refused:
        await charge(which, here, 90, seconds=0.2)
    done = [one.done() for one in ahead]
    which.clock.advance(refused.value.retry_after_seconds - 0.001)
    left = which.routers[lender(which)].quotas.ledger.account("acme", 0.0).tokens.level
    # All of them that still waited, and then its own.
    assert left == pytest.approx(60 * done.count(False) + 90, abs=0.5)
    for one in ahead:
        one.cancel()
    await asyncio.wait(ahead)


async def test_a_request_without_a_lender_is_refused_before_its_deadline() -> None:
    """Its client then knows that the quota was why."""
    which, here = without_lender()
    waiting, other = charge(which, here, 10, seconds=0.5), charge(which, here, 10)
    await turns()
    which.clock.advance(0.46)
    with pytest.raises(QuotaUnavailable, match="no router has lent the quota of tenant 'acme'"):
        await waiting
    assert not other.done()
    which.clock.advance(1.0)
    await other


async def test_a_request_behind_one_with_more_time_is_refused_before_its_own_deadline() -> None:
    which, here = without_lender()
    ahead, behind = charge(which, here, 10), charge(which, here, 10, seconds=0.05)
    with pytest.raises(QuotaUnavailable):
        await behind
    assert not ahead.done()
    which.clock.advance(1.5)
    await ahead


async def test_the_deadline_of_a_request_bounds_its_wait_for_a_quota() -> None:
    which, here = without_lender()
    context = request_context(seconds=0.5)

    async def tracked() -> None:
        async with which.routers[here].admission.track_tenant(context):
            pass

    which.cut = {(one, two) for one in which.routers for two in which.routers if one != two}
    which.clock.advance(2.0)
    waiting = asyncio.create_task(tracked())
    await turns()
    assert not waiting.done()
    which.clock.advance(0.5)
    with pytest.raises(QuotaUnavailable):
        await waiting


async def test_a_cancelled_request_leaves_its_place_in_the_line() -> None:
    which, here = without_lender()
    waiting = [charge(which, here, 10) for _ in range(5)]
    await turns()
    for one in (waiting[0], waiting[2], waiting[4]):
        one.cancel()
    await turns()
    which.clock.advance(1.5)
    done, _ = await asyncio.wait(waiting)
    assert sum(one.cancelled() for one in done) == 3
    queue = which.routers[here].quotas._tenants["acme"].to_prefill
    assert (queue.length, queue.joined_seconds, queue.left_seconds, queue.turn.locked()) == (0, 0.0, 0.0, False)
