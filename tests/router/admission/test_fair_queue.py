"""The fair queue of the product in virtual time: 64 places, tenants that send more than these can serve.

A place is taken for the time that a prompt of so many tokens and its answer take; see `seconds_of`.
"""

import heapq
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from support.clock import ManualClock

from router.admission import fair_queue
from router.admission.fair_queue import TOKEN_WORK, FairQueue
from router.admission.lanes import Ticket
from router.config import Fairness

PLACES = 64
CAPACITY = PLACES / 3.8  # requests a second of 2,000 and 300 tokens, if all were of the median length


@dataclass(frozen=True)
class Load:
    """A tenant's requests: how many a second, their tokens (medians, log-normal), and from when on."""

    rate: float
    prompt: int = 2000
    answer: int = 300
    priority: int = 0
    begins: float = 0.0


@dataclass
class Result:
    """Of each tenant: its times to the first token, and its work in each 10 s."""

    first_tokens: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    work: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))

    def p99(self, tenant: str) -> float:
        times = sorted(self.first_tokens[tenant])
        return times[int(0.99 * len(times))]

    @property
    def total(self) -> float:
        return sum(sum(slices.values()) for slices in self.work.values())

    def ratios(self, one: str, other: str, slices: range) -> list[float]:
        pairs = [sorted((self.work[one][at], self.work[other][at])) for at in slices]
        return sorted(most / max(1.0, least) for least, most in pairs)


def seconds_of(prompt: int, answer: int) -> float:
    return prompt / 10_000 + answer * 0.012


def run(fairness: Fairness, tenants: dict[str, Load], until: float = 600.0, seed: int = 1) -> Result:
    """The outcomes of the requests that came until then."""
    clock, chance, result = ManualClock(), random.Random(seed), Result()
    start, queue, free = clock(), FairQueue(fairness, clock), PLACES
    events: list[tuple[float, int, tuple[str, int, int] | tuple[Ticket, int]]] = []
    number = 0
    for name, load in tenants.items():
        at = load.begins
        while at < until:
            at += chance.expovariate(load.rate)
            prompt = max(16, int(chance.lognormvariate(math.log(load.prompt), 0.6)))
            answer = max(4, int(chance.lognormvariate(math.log(load.answer), 0.6)))
            events.append((at, number := number + 1, (name, prompt, answer)))
    heapq.heapify(events)
    answers: dict[Ticket, int] = {}
    while events and events[0][0] <= until:
        at, _, event = heapq.heappop(events)
        clock.advance(start + at - clock())
        if len(event) == 3:
            name, prompt, answer = event
            ticket = queue.ticket(name, tenants[name].priority, prompt)
            answers[ticket] = answer
            queue.push(ticket)
        else:
            free += 1
            queue.end(event[0], 0, event[1])
        while free and queue.count:
            free -= 1
            ticket = queue.pop()
            name, prompt, answer = ticket.tenant.name or names(tenants), ticket.prompt_tokens, answers.pop(ticket)
            seconds = seconds_of(prompt, answer)
            heapq.heappush(events, (at + seconds, number := number + 1, (ticket, answer)))
            result.first_tokens[name].append(clock() - ticket.since + prompt / 40_000)
            for slot in range(int(at // 10), int((at + seconds) // 10) + 1):
                inside = max(0.0, min(at + seconds, slot * 10 + 10) - max(at, slot * 10))
                result.work[name][slot] += (prompt + TOKEN_WORK * answer) * inside / seconds
    return result


def names(tenants: dict[str, Load]) -> str:
    """Without tenants in the queue all requests are of the same one."""
    return next(iter(tenants))


LIGHT = Load(CAPACITY * 0.05)
FLOOD = Load(CAPACITY, begins=30.0)


def test_a_light_tenant_beside_a_flood_of_twenty_times_as_much_waits_little() -> None:
    alone = run("weighted", {"light": LIGHT}).p99("light")
    beside = run("weighted", {"light": LIGHT, "flood": FLOOD})
    assert beside.p99("light") <= 2.5 * alone
    before = run("none", {"light": LIGHT, "flood": FLOOD})
    assert beside.total >= 0.97 * before.total
    assert before.p99("light") > 50 * alone


@pytest.mark.parametrize("seed", range(3))
def test_two_backlogged_tenants_of_different_shapes_get_the_same_in_every_ten_seconds(seed: int) -> None:
    tenants = {"long": Load(CAPACITY * 0.6, 16_000, 30), "chat": Load(CAPACITY * 2, 500, 600)}
    ratios = run("weighted", tenants, seed=seed).ratios("long", "chat", range(10, 58))
    assert ratios[int(0.95 * len(ratios))] <= 1.2


@pytest.mark.parametrize("fairness", ["weighted", "strict"])
def test_a_tenant_that_comes_later_gets_as_much_as_the_early_one_and_no_more(fairness: Fairness) -> None:
    tenants = {"late": Load(CAPACITY * 1.5, begins=300.0), "early": Load(CAPACITY * 1.5)}
    result = run(fairness, tenants)
    ratios = [result.work["late"][at] / result.work["early"][at] for at in range(31, 40)]
    assert 0.9 <= sum(ratios) / len(ratios) <= 1.1


def test_a_tenant_that_was_alone_for_long_without_waiting_does_not_pay_for_it_later() -> None:
    tenants = {"busy": Load(CAPACITY * 0.6), "both": Load(CAPACITY * 3, begins=300.0)}
    result = run("weighted", tenants)
    ratios = [result.work["busy"][at] / result.work["both"][at] for at in range(31, 36)]
    assert 0.8 <= sum(ratios) / len(ratios) <= 1.25


def test_a_tenant_that_comes_back_is_next_whatever_the_other_ones_answers_are_corrected_by() -> None:
    queue = FairQueue("weighted", ManualClock())
    for _ in range(8):
        queue.push(queue.ticket("flood", 0, 100))
    running = [queue.pop() for _ in range(4)]
    queue.push(queue.ticket("light", 0, 100))
    # A short answer lowers the flood's counter, and a place gets free.
    queue.end(running[0], 0, 1)
    assert queue.pop().tenant.name == "light"


def test_a_tenant_that_comes_back_each_time_gets_no_more_than_one_that_always_waits() -> None:
    queue, got = FairQueue("weighted", ManualClock()), {"again": 0, "always": 0}
    for _ in range(400):
        queue.push(queue.ticket("always", 0, 100))
    for _ in range(300):
        if not any(tenant.name == "again" for tenant in queue.waiting()):
            queue.push(queue.ticket("again", 0, 100))
        ticket = queue.pop()
        got[ticket.tenant.name] += 1
        queue.end(ticket, 0, 50)
    assert abs(got["again"] - got["always"]) <= 2


def test_an_estimate_that_the_tenant_has_spoiled_gains_it_nothing() -> None:
    """Long answers begin while short ones are expected, and short ones while long ones are, again and again."""
    queue = FairQueue("weighted", ManualClock())
    real = 0.0
    queue.push(queue.ticket("a", -10, 100))  # so that it always waits, and is not lifted
    for answer in (1, 10_000) * 20:
        for _ in range(PLACES):
            queue.push(queue.ticket("a", 0, 100))
        running = [queue.pop() for _ in range(PLACES)]
        for ticket in running:
            queue.end(ticket, 0, answer)
            real += 100 + TOKEN_WORK * answer
    counter = next(one.counter for one in queue.tenants if one.name == "a")
    assert abs(counter - real) <= PLACES * TOKEN_WORK * 10_000


def test_priorities_weigh_and_do_not_starve() -> None:
    tenants = {"urgent": Load(CAPACITY * 2, priority=5), "plain": Load(CAPACITY * 2)}
    result = run("weighted", tenants)
    ratios = result.ratios("urgent", "plain", range(10, 58))
    assert 1.8 <= ratios[len(ratios) // 2] <= 2.2


def test_strict_priorities_go_first_whoever_sent_them() -> None:
    queue = FairQueue("strict", ManualClock())
    for name, priority in (("a", 0), ("a", 5), ("b", 0), ("b", 5), ("a", 5)):
        queue.push(queue.ticket(name, priority, 100))
    order = [(one.tenant.name, one.priority) for one in (queue.pop() for _ in range(5))]
    assert order == [("a", 5), ("b", 5), ("a", 5), ("a", 0), ("b", 0)]


def test_within_a_tenant_the_most_urgent_goes_first_and_equals_in_their_order() -> None:
    queue = FairQueue("weighted", ManualClock())
    tickets = [queue.ticket("a", priority, 100) for priority in (0, 5, 0, 5)]
    for ticket in tickets:
        queue.push(ticket)
    assert [tickets.index(queue.pop()) for _ in tickets] == [1, 3, 0, 2]


def test_a_flood_is_refused_and_not_the_tenant_that_has_little_in_a_full_queue() -> None:
    queue = FairQueue("weighted", ManualClock())
    for _ in range(100):
        queue.push(queue.ticket("flood", 10, 100))
    newest = queue.ticket("flood", 10, 100)
    assert queue.to_evict(newest) is newest
    light = queue.ticket("light", -10, 100)
    assert queue.to_evict(light).tenant.name == "flood"


def test_what_a_prefix_cache_saves_is_expected_of_the_next_requests_too() -> None:
    queue = FairQueue("weighted", ManualClock())
    for _ in range(100):
        ticket = queue.ticket("agent", 0, 10_000, generates=False)
        queue.begin(ticket)
        queue.end(ticket, cached_tokens=9_000)
    assert queue.ticket("agent", 0, 10_000, generates=False).work == pytest.approx(1_000, rel=0.01)


def test_what_used_no_worker_is_not_counted() -> None:
    queue = FairQueue("weighted", ManualClock())
    queue.push(queue.ticket("a", 0, 100))
    before = queue.pop()
    counter = before.tenant.counter
    ticket = queue.ticket("a", 0, 5000)
    queue.begin(ticket)
    queue.undo(ticket)
    assert before.tenant.counter == pytest.approx(counter)
    assert before.tenant.running == 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("fairness", ["weighted", "strict", "none"])
def test_whatever_happens_counts_return_to_zero_and_no_request_is_lost(seed: int, fairness: Fairness) -> None:
    chance, clock = random.Random(seed), ManualClock()
    queue = FairQueue(fairness, clock)
    waiting: list[Ticket] = []
    running: list[Ticket] = []
    for _ in range(5000):
        match chance.choice(["push", "push", "begin", "pop", "discard", "end", "undo", "others", "time"]):
            case "push":
                waiting.append(queue.ticket(f"t{chance.randint(0, 50)}", chance.randint(-10, 10), 100))
                queue.push(waiting[-1])
            case "begin":
                running.append(queue.ticket(f"t{chance.randint(0, 50)}", chance.randint(-10, 10), 100))
                queue.begin(running[-1])
            case "pop" if waiting:
                ticket = queue.pop()
                waiting.remove(ticket)
                running.append(ticket)
            case "discard" if waiting:
                ticket = waiting.pop(chance.randrange(len(waiting)))
                assert queue.discard(ticket)
                assert not queue.discard(ticket)
            case "end" if running:
                queue.end(running.pop(chance.randrange(len(running))), chance.randint(0, 200), chance.randint(0, 500))
            case "undo" if running:
                queue.undo(running.pop(chance.randrange(len(running))))
            case "others":
                queue.set_counter(f"t{chance.randint(0, 50)}", chance.uniform(-100, 1000))
            case "time":
                clock.advance(chance.random())
        assert queue.count == len(waiting)
        if waiting:
            assert queue.work_ahead(waiting[0]) >= 0
            assert queue.to_evict(queue.ticket("new", 0, 1)) is not None
    for ticket in running:
        queue.end(ticket)
    assert {queue.pop() for _ in waiting} == set(waiting)
    for ticket in waiting:
        queue.undo(ticket)
    assert all((one.running, one.count, one.work) == (0, 0, 0.0) for one in queue.tenants)
    assert not list(queue.waiting())
    lanes = queue._lanes.values()
    assert all((lane.active, lane.longest, lane.work) == (0, 0, 0.0) for lane in lanes)
    assert all(not lane.least for lane in lanes)


def test_made_up_names_are_bounded_and_those_that_run_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MOST_TENANTS", 100)
    queue = FairQueue("weighted", ManualClock())
    kept = [queue.ticket(f"runs {number}", 0, 10) for number in range(50)]
    for ticket in kept:
        queue.begin(ticket)
    for number in range(100_000):
        ticket = queue.ticket(f"made up {number}", 0, 10)
        queue.begin(ticket)
        queue.end(ticket)
    assert len(list(queue.tenants)) <= 101
    assert all(queue.ticket(f"runs {number}", 0, 10).tenant is kept[number].tenant for number in range(50))


def test_when_all_names_are_in_use_new_ones_share_one_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MOST_TENANTS", 100)
    queue = FairQueue("weighted", ManualClock())
    for number in range(10_000):
        queue.push(queue.ticket(f"made up {number}", 0, 10))
    assert len(list(queue.tenants)) <= 101
    for _ in range(10_000):
        queue.pop()
    assert queue.count == 0
