"""The places of a worker that several routers share, in virtual time."""

import asyncio
import heapq
import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from support.router.contexts import request_context
from support.router.fleets import Fleet, record

from baton.errors import BatonError
from router.admission.places import key_of
from router.admission.predictor import RequestEstimate
from router.admission.queue import AdmissionQueue
from router.config import AdmissionConfig, Fairness
from router.peers.quorum import score
from router.qos import RequestQos

PLACES, STEP = 16, 0.05


@dataclass(eq=False)
class Traffic:
    """Requests of tenants at routers; each runs for its seconds once it is admitted."""

    fleet: Fleet
    work: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of places
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    most: int = 0
    _running: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _ends: list[tuple[float, int, asyncio.Event]] = field(default_factory=list)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _number: int = 0

    @property
    def unfinished(self) -> int:
        return len(self._tasks)

    @property
    def running(self) -> int:
        return sum(self._running.values())

    def send(self, router: str, tenant: str, seconds: float = 1.0) -> None:
        task = asyncio.create_task(self._run(router, tenant, seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, router: str, tenant: str, seconds: float) -> None:
        sent, ended = self.fleet.clock(), asyncio.Event()
        ctx = replace(request_context(seconds=3600), qos=RequestQos(tenant))
        with suppress(BatonError):
            async with self.fleet.routers[router].admission.admit(ctx, RequestEstimate("m", 100, 10)):
                self._running[router] += 1
                self.most = max(self.most, self.running)
                self.waits[tenant].append(self.fleet.clock() - sent)
                self._number += 1
                heapq.heappush(self._ends, (self.fleet.clock() + seconds, self._number, ended))
                try:
                    await ended.wait()
                    self.work[tenant] += seconds
                    ctx.stats.completion_tokens = 10
                finally:
                    self._running[router] -= 1

    async def step(self) -> None:
        self.fleet.clock.advance(STEP)
        while self._ends and self._ends[0][0] <= self.fleet.clock():
            heapq.heappop(self._ends)[2].set()
        for _ in range(2):
            await _settle()
            for router in list(self.fleet.routers.values()):
                await router.admission.ask_due()
        await _settle()

    async def kill(self, router: str) -> None:
        """Ends a router, and with it all its requests."""
        self.fleet.kill(router)
        self._running[router] = 0

    def cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def queues(which: Fleet) -> list[AdmissionQueue]:
    return [queue for router in which.routers.values() for queue in router.admission.queues]


def fleet(routers: int, fairness: Fairness = "weighted") -> Fleet:
    config = AdmissionConfig(max_running_per_worker=PLACES, max_waiting=10_000)
    made = Fleet(admission=config, fairness=fairness)
    for number in range(routers):
        made.start(f"r{number}")
    made.clock.advance(2.0)
    return made


@pytest.mark.parametrize("routers", [2, 8])
async def test_all_routers_together_run_no_more_than_the_workers_may_and_no_less(routers: int) -> None:
    traffic = Traffic(fleet(routers))
    for _ in range(200):
        for number in range(routers):
            traffic.send(f"r{number}", "acme")
    busy = []
    for _ in range(200):
        await traffic.step()
        busy.append(traffic.running)
    assert traffic.most == PLACES
    assert sum(busy[20:]) >= 0.97 * PLACES * len(busy[20:])
    traffic.cancel_all()


async def test_places_go_to_where_the_requests_are() -> None:
    traffic = Traffic(fleet(2))
    for router in ("r0", "r1", "r0"):
        for _ in range(PLACES * 4):
            traffic.send(router, "acme")
        began = traffic.fleet.clock()
        for _ in range(400):
            await traffic.step()
            if not traffic.unfinished:
                break
        assert traffic.fleet.clock() - began < 6.0, "four rounds of a second each, on all places"
    assert traffic.most == PLACES


@pytest.mark.parametrize("first_known", [(), ("r0",), ("r1",)])
async def test_two_routers_that_start_at_once_overfill_no_worker(first_known: tuple[str, ...]) -> None:
    """Each takes itself for the only one until the registry has shown it the other one."""
    starting = fleet(0)
    starting.late = {"r0", "r1"}
    for name in ("r0", "r1"):
        starting.start(name).peers.update(())
    traffic = Traffic(starting)
    for name in ("r0", "r1"):
        for _ in range(PLACES * 4):
            traffic.send(name, "acme")
    await traffic.step()
    assert traffic.running == 0
    for name in first_known:
        # Its view is of the moment before the other one was registered.
        starting.routers[name].peers.update([record(name)])
        await traffic.step()
        assert traffic.running == PLACES
    # Of two views that arrive one after the other, the second may be late.
    for name in ("r1", "r0"):
        starting.late.discard(name)
        starting.see()
        await traffic.step()
    began = starting.clock()
    while traffic.running < PLACES and starting.clock() - began < 2.0:
        await traffic.step()
    assert traffic.running == PLACES
    assert starting.clock() - began < 0.5, "both have told what they hold"
    for _ in range(100):
        await traffic.step()
    assert traffic.most == PLACES
    traffic.cancel_all()


async def test_a_router_that_sees_no_other_one_has_all_places_once_it_is_registered_or_after_a_moment() -> None:
    for is_registered in (True, False):
        lone = fleet(0)
        lone.late = set() if is_registered else {"r0"}
        lone.start("r0")
        traffic = Traffic(lone)
        for _ in range(PLACES):
            traffic.send("r0", "acme", 60.0)
        began = lone.clock()
        while traffic.running < PLACES and lone.clock() - began < 3.0:
            await traffic.step()
        assert traffic.running == PLACES
        assert lone.clock() - began <= (0.05 if is_registered else 1.2)
        traffic.cancel_all()


async def test_a_router_that_was_alone_lends_no_place_that_its_own_requests_use() -> None:
    traffic = Traffic(fleet(1))
    for _ in range(PLACES):
        traffic.send("r0", "acme", 60.0)
    await traffic.step()
    key = key_of("m", "decode")
    other = next(name for name in map(str, range(100)) if score(key, "r0") > score(key, name))
    joined = traffic.fleet.start(other)
    traffic.send(other, "acme")
    for _ in range(3):
        await _settle()
        # Its question is the first that the home gets.
        await joined.admission.ask_due()
    await _settle()
    assert traffic.most == PLACES
    traffic.cancel_all()


async def test_what_waits_at_the_last_router_is_admitted_when_the_other_one_is_gone() -> None:
    traffic = Traffic(fleet(2))
    for name in ("r0", "r1"):
        for _ in range(PLACES):
            traffic.send(name, "acme", 60.0)
            await traffic.step()
    await traffic.kill("r0")
    traffic.fleet.expire("r0")
    for _ in range(3):
        await traffic.step()
    assert traffic.running == PLACES
    traffic.cancel_all()


@pytest.mark.parametrize("fairness", ["weighted", "none"])
async def test_a_flood_at_one_router_leaves_the_others_their_part(fairness: Fairness) -> None:
    traffic = Traffic(fleet(2, fairness))
    for _ in range(600):
        traffic.send("r0", "flood")
    for _ in range(100):
        await traffic.step()
    for _ in range(300):
        traffic.send("r1", "other")
    for _ in range(60):
        await traffic.step()
    before = dict(traffic.work)
    for _ in range(200):
        await traffic.step()
    flood, other = (traffic.work[name] - before.get(name, 0.0) for name in ("flood", "other"))
    assert 0.8 <= flood / other <= 1.25
    assert traffic.most == PLACES
    traffic.cancel_all()


async def test_a_light_tenant_waits_for_the_next_free_place_of_any_router() -> None:
    means = []
    for routers in (1, 2):
        chance = random.Random(3)
        traffic = Traffic(fleet(routers))
        for number in range(2400):
            router = f"r{chance.randrange(routers)}"
            if chance.random() < 0.95:
                traffic.send(router, "flood", chance.lognormvariate(0.0, 0.5))
            if number % 20 == 19:
                traffic.send(router, "light", chance.lognormvariate(0.0, 0.5))
            await traffic.step()
        waits = traffic.waits["light"][20:]
        means.append(sum(waits) / len(waits))
        traffic.cancel_all()
    # Without the other router's places it would be the next of half as many.
    assert means[1] <= 1.4 * means[0]


async def test_work_at_all_routers_counts_so_that_a_tenant_at_both_gets_no_more_than_one_at_one() -> None:
    traffic = Traffic(fleet(2))
    for _ in range(600):
        traffic.send("r0", "both")
        traffic.send("r1", "both")
        traffic.send("r1", "one")
    for _ in range(600):
        await traffic.step()
    assert traffic.work["both"] / traffic.work["one"] < 1.35
    traffic.cancel_all()


@pytest.mark.parametrize("seed", range(5))
async def test_routers_that_come_and_go_overfill_nothing_and_leave_nothing(seed: int) -> None:
    chance = random.Random(seed)
    traffic = Traffic(fleet(4))
    born = 4
    for number in range(600):
        names = list(traffic.fleet.routers)
        for _ in range(chance.randint(0, 3)):
            traffic.send(chance.choice(names), f"t{chance.randint(0, 5)}", chance.uniform(0.1, 2.0))
        if chance.random() < 0.3:
            traffic.fleet.cut = {(chance.choice(names), chance.choice(names))} if chance.random() < 0.5 else set()
        if number % 150 == 149:
            victim = chance.choice(names)
            await traffic.kill(victim)
            traffic.fleet.expire(victim)
            traffic.fleet.start(f"r{born}")
            born += 1
        await traffic.step()
    traffic.fleet.cut.clear()
    # A router that cannot reach the home for a second has its even part beside what the home lends the others.
    assert traffic.most <= PLACES + PLACES // 4
    for _ in range(4000):
        await traffic.step()
        if not any(queue.running + queue.waiting for queue in queues(traffic.fleet)):
            break
    for _ in range(100):
        await traffic.step()
    for router in traffic.fleet.routers.values():
        for queue in router.admission.queues:
            assert (queue.running, queue.waiting) == (0, 0)
            assert all((tenant.running, tenant.count) == (0, 0) for tenant in queue.order.tenants)
        assert all(places.held == 0 for places in router.admission._places.values())
    traffic.cancel_all()
