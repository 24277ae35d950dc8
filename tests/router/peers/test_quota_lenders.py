"""The lender of a quota: one at a time, whatever stands still, is cut off, is late or dies; and soon another one."""

import asyncio
import random

import pytest
from support.eventually import eventually
from support.router.demand import LEASE_SECONDS, RATE, ROUTERS, STEP, Demand, assert_bounded, fleet, lender, uses
from support.router.fleets import Fleet
from support.sampled import sampled

from baton.errors import QuotaExceeded, QuotaUnavailable
from router.admission.quotas import Quotas
from router.config import QuotaConfig, QuotasConfig
from router.peers.quorum import score
from router.telemetry.stats import RequestStats

LOADS = pytest.mark.parametrize("load", [3.0, 0.9])
# A lender begins with an empty bucket, which fills slowly where nearly all of the quota is used.
LEAST = {3.0: 0.98, 0.9: 0.9}  # of the quota, in the seconds after a change


@LOADS
@pytest.mark.parametrize("seed", sampled(range(2), [0]))
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


@LOADS
async def test_a_lender_that_is_killed_costs_one_second_of_the_quota(load: float) -> None:
    which = fleet()
    demand = Demand(which, load)
    await demand.run(10.0)
    home = lender(which)
    which.kill(home)
    await demand.run(LEASE_SECONDS)
    # Below the quota the burst that is left is used as well.
    assert demand.part(LEASE_SECONDS, load) >= (LEASE_SECONDS - 1.0) / LEASE_SECONDS
    which.expire(home)
    await demand.run(20.0)
    assert_bounded(demand)
    assert demand.part(20.0, load) > LEAST[load]


@LOADS
async def test_a_router_that_joins_and_becomes_the_lender_costs_less_than_a_fifth_of_a_second(load: float) -> None:
    which = fleet()
    demand, name = Demand(which, load), _first_of_new_names(which)
    await demand.run(10.0)
    which.start(name)
    await demand.run(10.0)
    assert lender(which) == name
    assert_bounded(demand)
    assert demand.part(10.0, load) > LEAST[load]


def test_a_router_that_cannot_lend_yet_takes_no_quota_from_its_lender() -> None:
    """One of the others does not know it for long, so that it lends nothing."""
    which = fleet()
    name, home = _first_of_new_names(which), lender(which)
    which.late = {next(other for other in which.routers if other != home)}
    which.start(name)
    for _ in range(100):
        which.clock.advance(0.1)
        assert lender(which) == home
    which.late.clear()
    which.see()
    which.clock.advance(2.0)
    assert lender(which) == name


def test_a_lender_whose_record_is_lost_is_replaced_before_the_others_see_that() -> None:
    which = fleet()
    home = lender(which)
    which.late = set(which.routers) - {home}
    which.expire(home)
    which.clock.advance(1.0)
    assert lender(which) != home


@LOADS
@pytest.mark.parametrize("seconds", [1.0, 3.0, 10.0])
async def test_a_lender_that_stood_still_has_nothing_to_lend_when_it_goes_on(seconds: float, load: float) -> None:
    """Before anything reaches it, its own clients do."""
    which = fleet()
    demand = Demand(which, load)
    await demand.run(10.0)
    home = lender(which)
    which.pause(home)
    await demand.run(min(seconds, LEASE_SECONDS))
    if seconds > LEASE_SECONDS:
        which.expire(home)
        await demand.run(seconds - LEASE_SECONDS)
    assert len(which.routers) == ROUTERS
    which.resume(home)
    await demand.run(1.0)
    if seconds > LEASE_SECONDS:
        which.registered.append(home)
    which.see()
    await demand.run(10.0)
    assert_bounded(demand)
    assert demand.part(5.0, load) > LEAST[load]


@LOADS
@pytest.mark.parametrize("others", sampled([1, 3, 4, 7], [3, 4]))
async def test_a_lender_that_is_cut_off_lends_no_more_than_the_quota_beside_the_next_one(
    others: int, load: float
) -> None:
    """It goes on for its clients, and for the routers on its side."""
    which = fleet()
    demand = Demand(which, load)
    await demand.run(10.0)
    home = lender(which)
    far = [name for name in which.routers if name != home][:others]
    near = [name for name in which.routers if name not in far]
    which.cut = {pair for one in near for two in far for pair in ((one, two), (two, one))}
    await demand.run(10.0)
    which.cut.clear()
    await demand.run(10.0)
    assert_bounded(demand)
    assert demand.part(5.0, load) > LEAST[load]


@LOADS
async def test_two_groups_with_different_views_of_the_registry_have_one_quota(load: float) -> None:
    """Three routers do not see for long that five have come, nor that one has left."""
    which = fleet(3)
    which.late = {"r0", "r1", "r2"}
    demand = Demand(which, load)
    for number in range(3, ROUTERS):
        which.start(f"r{number}")
    await demand.run(10.0)
    which.late = {"r0"}
    which.see()
    await demand.run(5.0)
    which.expire("r5")
    await demand.run(10.0)
    which.late.clear()
    which.see()
    await demand.run(10.0)
    assert_bounded(demand)
    assert demand.part(5.0, load) > LEAST[load]


@pytest.mark.parametrize("seed", sampled([0, 1, 2, 3, 103, 106], [0, 103, 106]))
async def test_whatever_happens_to_routers_they_use_no_more_than_the_quota(seed: int) -> None:
    which, chance = fleet(), random.Random(seed)
    demand, ends = Demand(which, chance.choice([0.9, 3.0, 3.0]), seed), list[tuple[float, str, str]]()
    for number in range(60):
        _disturb(which, chance, number, ends)
        await demand.run(0.5)
        for end in [one for one in ends if one[0] <= number]:
            ends.remove(end)
            _mend(which, *end[1:])
        if chance.random() < 0.7:
            which.see()
    assert_bounded(demand)


def _disturb(which: Fleet, chance: random.Random, number: int, ends: list[tuple[float, str, str]]) -> None:
    """Something that goes on for up to eight seconds."""
    awake = [name for name, one in which.routers.items() if not one.is_paused]
    name, other = chance.sample(sorted(awake), 2) if len(awake) > 4 else ("", "")
    what = chance.choice(["pause", "cut", "one way", "late", "expire", "kill", "start", ""])
    if not name or not what:
        return
    match what:
        case "pause":
            which.pause(name)
        case "cut":
            which.cut |= {(name, other), (other, name)}
        case "one way":
            which.cut.add((name, other))
        case "late":
            which.late.add(name)
        case "expire":
            if name in which.registered:
                which.expire(name)
        case "kill":
            which.kill(name)
        case "start":
            which.start(f"s{number}")
    ends.append((number + chance.randint(0, 16), what, name))


def _mend(which: Fleet, what: str, name: str) -> None:
    match what:
        case "pause":
            which.resume(name) if name in which.routers else None
        case "cut" | "one way":
            which.cut = {pair for pair in which.cut if name not in pair}
        case "late":
            which.late.discard(name)
        case "expire":
            which.registered.append(name) if name in which.routers and name not in which.registered else None
        case "kill":
            which.expire(name) if name in which.registered else None


async def test_one_of_two_routers_goes_on_without_the_other_one() -> None:
    """The one that lends at once, the other one when the registry has forgotten the first."""
    which = fleet(2, tokens_per_second=100, burst_seconds=10)
    home = lender(which)
    other = next(name for name in which.routers if name != home)
    which.clock.advance(20.0)
    which.cut = {(home, other), (other, home)}
    which.clock.advance(2.0)
    assert await uses(which, home, 900)
    with pytest.raises(QuotaUnavailable, match="acme"):
        async with which.routers[other].quotas.charge("acme", 1):
            pass
    which.kill(home)
    which.expire(home)
    which.clock.advance(1.0)
    assert not await uses(which, other, 500)
    which.clock.advance(9.0)
    assert await uses(which, other, 900)


async def test_a_router_alone_that_stood_still_begins_anew() -> None:
    """Meanwhile another one may have come that took it for gone."""
    which = fleet(1, tokens_per_second=100, burst_seconds=10)
    assert await uses(which, "r0", 900)
    which.pause("r0")
    which.clock.advance(5.0)
    which.resume("r0")
    assert not await uses(which, "r0", 1)
    which.clock.advance(1.0)
    assert not await uses(which, "r0", 500)
    which.clock.advance(10.0)
    assert await uses(which, "r0", 900)


def _first_of_new_names(which: Fleet) -> str:
    """A name that comes before all others for the tenant."""
    best = max(score("acme", name) for name in which.routers)
    return next(name for number in range(1000) if score("acme", name := f"n{number}") > best)


async def test_a_request_waits_for_the_next_lender_and_no_longer_than_two_seconds() -> None:
    """By real time: the routers' clock is moved beside it."""
    which = fleet(3, tokens_per_second=100, burst_seconds=10)
    home = lender(which)
    here = next(name for name in which.routers if name != home)
    quotas = Quotas(QuotasConfig(default=QuotaConfig(requests_per_second=1)), which.clock, which.routers[here].peers)
    which.kill(home)
    waiting = asyncio.create_task(_begin(quotas))
    while not waiting.done():
        await asyncio.sleep(0.01)
        which.clock.advance(0.05)
    # It is answered; the next lender's bucket was empty.
    assert not isinstance(waiting.exception(), QuotaUnavailable)
    which.cut = {(one, two) for one in which.routers for two in which.routers if one != two}
    which.clock.advance(2.0)
    waiting = asyncio.create_task(_begin(quotas))
    while not waiting.done():
        await asyncio.sleep(0.01)
        which.clock.advance(0.05)
    assert isinstance(waiting.exception(), QuotaUnavailable)


async def test_a_request_waits_for_the_bucket_of_a_new_lender_and_is_refused_by_an_old_one() -> None:
    """The new one does not know what was left, which is no fault of the tenant."""
    which = fleet(3, wait_seconds=2.0, tokens_per_second=100, burst_seconds=10)
    home = lender(which)
    which.kill(home)
    which.expire(home)
    which.clock.advance(1.0)
    here = lender(which)
    [there] = which.routers.keys() - {here}
    waiting = [asyncio.create_task(_charge(which, name, 100)) for name in (here, there)]
    await eventually(lambda: which.asked[here] > 0)
    assert not any(task.done() for task in waiting)
    while not all(task.done() for task in waiting):
        await asyncio.sleep(0.01)
        which.clock.advance(0.02)
    assert [task.exception() for task in waiting] == [None, None]
    for name in (here, there):
        with pytest.raises(QuotaExceeded, match="tokens"):
            await _charge(which, name, 900)
    at_once = [asyncio.create_task(_charge(which, here, 100)) for _ in range(50)]
    # No more than it refills in two seconds.
    await eventually(lambda: sum(task.done() for task in at_once) >= 48)
    assert sum(not task.done() for task in at_once) in (1, 2)
    for task in at_once:
        task.cancel()
    await asyncio.wait(at_once)
    which.clock.advance(20.0)
    assert await uses(which, here, 1000)
    for name in (here, there):
        with pytest.raises(QuotaExceeded, match="tokens"):
            await _charge(which, name, 150)


async def test_the_refusal_of_an_answer_that_would_go_on_is_not_that_of_a_running_requests_prompt() -> None:
    which = fleet(3, concurrent=1, tokens_per_second=100, burst_seconds=10)
    home = lender(which)
    here = next(name for name in which.routers if name != home)
    which.clock.advance(20.0)
    async with which.routers[here].quotas.track("acme", RequestStats("running")):
        with pytest.raises(QuotaExceeded, match="as many requests are running as may"):
            async with which.routers[here].quotas.track("acme", RequestStats("goes on"), 0):
                pass
        await _charge(which, here, 5)


async def _charge(which: Fleet, name: str, tokens: int) -> None:
    async with which.routers[name].quotas.charge("acme", tokens):
        pass


async def test_requests_that_wait_for_a_lender_ask_for_it_together() -> None:
    """Each asks behind the others: of a thousand with an answer in a millisecond, the last ones after a second."""
    which = fleet(3)
    home = lender(which)
    here = which.routers[next(name for name in which.routers if name != home)]
    quotas = Quotas(QuotasConfig(default=QuotaConfig(requests_per_second=1)), which.clock, here.peers)
    which.kill(home)
    waiting = [asyncio.create_task(_begin(quotas)) for _ in range(50)]
    for _ in range(4):
        await asyncio.sleep(0.15)  # each has looked once more
        which.clock.advance(0.1)
    assert not any(task.done() for task in waiting)
    asked = which.asked[home]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert 2 <= asked <= 10


async def _begin(quotas: Quotas) -> None:
    async with quotas.track("acme", RequestStats("r")):
        pass


async def test_requests_that_wait_for_a_lender_are_not_counted_as_running() -> None:
    which = fleet(3, wait_seconds=2.0, tokens_per_second=0, concurrent=2)
    home = lender(which)
    here = next(name for name in which.routers if name != home)
    which.kill(home)
    which.expire(home)
    begun, go_on = [], asyncio.Event()

    async def run() -> None:
        async with which.routers[here].quotas.track("acme", RequestStats("r")):
            begun.append(1)
            await go_on.wait()

    waiting = [asyncio.create_task(run()) for _ in range(4)]
    while sum(task.done() for task in waiting) < 2:
        await asyncio.sleep(0.01)
        which.clock.advance(0.02)
    assert len(begun) == 2
    assert all(isinstance(task.exception(), QuotaExceeded) for task in waiting if task.done())
    go_on.set()
    await asyncio.wait(waiting)


@pytest.mark.parametrize("is_lender", [True, False])
async def test_requests_that_wait_for_a_bucket_are_served_before_those_that_come_later(is_lender: bool) -> None:
    which = fleet(3, wait_seconds=2.0, tokens_per_second=100, burst_seconds=10)
    home = lender(which)
    which.kill(home)
    which.expire(home)
    which.clock.advance(1.0)
    here = lender(which)
    name = here if is_lender else next(iter(which.routers.keys() - {here}))
    served: list[int] = []

    async def one(number: int) -> None:
        await _charge(which, name, 20)
        served.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(6)]
    await eventually(lambda: bool(served))
    # Meanwhile there is enough for one, for which those that wait have not looked yet.
    which.clock.advance(0.3)
    tasks.append(asyncio.create_task(one(6)))
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.01)
        which.clock.advance(0.01)
    assert served == list(range(7))
