"""The admission queue, with a limit and a clock that the test sets."""

import asyncio
import random

import pytest
from support.clock import ManualClock

from baton.errors import NoWorker, Overloaded
from router.admission.lanes import Ticket
from router.admission.queue import AdmissionQueue

OUTAGE = 10.0


class Queue:
    """A line whose limit is an attribute, and the order in which requests were let in."""

    def __init__(self, limit: int | None = 1, max_waiting: int = 10) -> None:
        self.limit = limit
        self.clock = ManualClock()
        self.entered: list[str] = []
        self.inside: list[Ticket] = []
        self.line = AdmissionQueue(
            lambda: self.limit, max_waiting, OUTAGE, clock=self.clock, call_later=self.clock.call_later
        )

    async def send(self, name: str, priority: int = 0) -> "asyncio.Task[None]":
        """A request that has reached the queue: it was admitted, it waits, or it was refused."""
        task = asyncio.create_task(self._enter(name, priority))
        await settle()
        return task

    async def _enter(self, name: str, priority: int) -> None:
        ticket = self.ticket(priority)
        if not self.line.enter_now(ticket):
            await self.line.enter(ticket)
        self.entered.append(name)
        self.inside.append(ticket)

    def ticket(self, priority: int = 0) -> Ticket:
        return self.line.order.ticket("", priority, 1)

    def end(self, seconds: float | None) -> None:
        self.line.leave(self.inside.pop(), seconds)

    async def leave(self, seconds: float = 1.0) -> None:
        self.end(seconds)
        await settle()

    async def set_limit(self, limit: int | None) -> None:
        self.limit = limit
        self.line.update()
        await settle()


async def settle() -> None:
    """Lets every task that can run, run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_a_limit_every_request_is_in_at_once() -> None:
    queue = Queue(limit=None)
    for number in range(100):
        await queue.send(str(number))
    assert (queue.line.running, queue.line.waiting) == (100, 0)


async def test_above_the_limit_requests_wait_until_another_leaves() -> None:
    queue = Queue(limit=2)
    tasks = [await queue.send(name) for name in "abc"]
    assert queue.entered == ["a", "b"]
    await queue.leave()
    assert queue.entered == ["a", "b", "c"]
    assert all(task.done() for task in tasks)


async def test_the_most_urgent_is_first_and_equals_keep_their_order() -> None:
    queue = Queue()
    await queue.send("inside")
    for name, priority in (("low", -10), ("first", 0), ("second", 0), ("high", 10), ("one", 1)):
        await queue.send(name, priority)
    for _ in range(5):
        await queue.leave()
    assert queue.entered == ["inside", "high", "one", "first", "second", "low"]


async def test_a_new_request_does_not_pass_those_that_wait() -> None:
    queue = Queue()
    await queue.send("inside")
    await queue.send("waits")
    queue.limit = 2  # and the queue does not know yet
    await queue.send("new")
    assert queue.entered == ["inside", "waits"]


async def test_more_room_lets_in_as_many_as_there_is_room_for() -> None:
    queue = Queue()
    for name in "abcde":
        await queue.send(name)
    await queue.set_limit(3)
    assert queue.entered == ["a", "b", "c"]
    await queue.set_limit(None)
    assert queue.entered == ["a", "b", "c", "d", "e"]


async def test_a_smaller_limit_lets_none_in_until_enough_have_left() -> None:
    queue = Queue(limit=3)
    for name in "abcd":
        await queue.send(name)
    await queue.set_limit(1)
    await queue.leave()
    await queue.leave()
    assert queue.entered == ["a", "b", "c"]
    await queue.leave()
    assert queue.entered == ["a", "b", "c", "d"]


async def test_a_full_line_refuses_a_request_that_is_not_more_urgent() -> None:
    queue = Queue(max_waiting=1)
    await queue.send("inside")
    await queue.send("waits")
    refused = await queue.send("refused")
    assert isinstance(refused.exception(), Overloaded)
    assert queue.line.waiting == 1


async def test_in_a_full_line_the_more_urgent_takes_the_place_of_the_last() -> None:
    queue = Queue(max_waiting=2)
    await queue.send("inside")
    earlier, later = await queue.send("earlier"), await queue.send("later")
    await queue.send("urgent", 1)
    assert isinstance(later.exception(), Overloaded)
    await queue.leave()
    await queue.leave()
    assert queue.entered == ["inside", "urgent", "earlier"]
    assert earlier.done()


async def test_a_full_line_says_when_to_come_back_from_how_long_requests_stay() -> None:
    queue = Queue(limit=2, max_waiting=4)
    for _ in range(4):
        await queue.send("measured")
        await queue.leave(seconds=3.0)
    for name in "abcdef":
        await queue.send(name)
    refused = await queue.send("refused")
    error = refused.exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after_seconds == pytest.approx(4 * 3.0 / 2)


async def test_a_request_that_gives_up_leaves_the_line() -> None:
    queue = Queue()
    await queue.send("inside")
    gone = await queue.send("gone")
    await queue.send("next")
    gone.cancel()
    await settle()
    assert queue.line.waiting == 1
    await queue.leave()
    assert queue.entered == ["inside", "next"]


async def test_a_request_that_gives_up_as_it_is_let_in_gives_its_place_to_the_next() -> None:
    queue = Queue()
    await queue.send("inside")
    gone = await queue.send("gone")
    await queue.send("next")
    queue.end(1.0)
    gone.cancel()
    await settle()
    assert queue.entered == ["inside", "next"]
    assert (queue.line.running, queue.line.waiting) == (1, 0)


async def test_the_expected_wait_counts_those_ahead_that_are_as_urgent() -> None:
    queue = Queue(limit=2)
    assert queue.line.expected_seconds(queue.ticket(0)) == 0.0
    for _ in range(4):
        await queue.send("measured")
        await queue.leave(seconds=4.0)
    for name in "abcde":
        await queue.send(name)
    assert queue.line.expected_seconds(queue.ticket(0)) == pytest.approx(4 * 4.0 / 2)
    assert queue.line.expected_seconds(queue.ticket(1)) == pytest.approx(1 * 4.0 / 2)


async def test_what_was_measured_long_ago_is_not_expected_any_more() -> None:
    queue = Queue()
    for _ in range(4):
        await queue.send("measured")
        await queue.leave(seconds=4.0)
    await queue.send("inside")
    assert queue.line.expected_seconds(queue.ticket(0)) == pytest.approx(4.0)
    queue.clock.advance(60)
    assert queue.line.expected_seconds(queue.ticket(0)) == 0.0


async def test_a_request_that_did_nothing_does_not_count_as_a_short_stay() -> None:
    queue = Queue()
    for _ in range(4):
        await queue.send("measured")
        await queue.leave(seconds=4.0)
    await queue.send("hopeless")
    queue.end(None)
    await queue.send("inside")
    assert queue.line.expected_seconds(queue.ticket(0)) == pytest.approx(4.0)


# No worker at all.


async def test_in_an_outage_requests_wait_and_go_on_when_a_worker_is_back() -> None:
    queue = Queue()
    for name in "abc":
        await queue.send(name)
    await queue.set_limit(0)
    await queue.leave()
    await queue.send("d")
    assert queue.entered == ["a"]
    queue.clock.advance(OUTAGE - 0.1)
    await queue.set_limit(2)
    assert queue.entered == ["a", "b", "c"]
    await queue.leave()
    assert queue.entered == ["a", "b", "c", "d"]


async def test_an_outage_that_lasts_refuses_all_that_wait() -> None:
    queue = Queue()
    await queue.send("inside")
    waiting = [await queue.send(name) for name in "abc"]
    await queue.set_limit(0)
    queue.clock.advance(OUTAGE)
    await settle()
    assert [type(task.exception()) for task in waiting] == [NoWorker] * 3
    assert queue.line.waiting == 0


async def test_after_a_long_outage_is_noticed_new_requests_do_not_wait() -> None:
    queue = Queue(limit=0)
    first = await queue.send("first")
    queue.clock.advance(OUTAGE)
    await settle()
    assert isinstance(first.exception(), NoWorker)
    await queue.send("second")
    assert queue.entered == ["second"]  # to be refused where workers are chosen


async def test_each_outage_is_waited_out_anew() -> None:
    queue = Queue(limit=0)
    await queue.send("a")
    queue.clock.advance(OUTAGE - 1)
    await queue.set_limit(1)
    await queue.set_limit(0)
    waits = await queue.send("b")
    queue.clock.advance(OUTAGE - 1)
    await settle()
    assert not waits.done()
    await queue.set_limit(2)
    assert queue.entered == ["a", "b"]


async def test_after_a_long_outage_the_limit_holds_again() -> None:
    queue = Queue(limit=0)
    await queue.send("refused")
    queue.clock.advance(OUTAGE)
    await queue.set_limit(1)
    await queue.send("a")
    await queue.send("b")
    assert queue.entered == ["a"]


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_and_goes_room_is_used_and_nothing_is_left(seed: int) -> None:
    chance = random.Random(seed)
    queue = Queue(limit=2, max_waiting=5)
    tasks: list[asyncio.Task[None]] = []
    left = 0
    for number in range(200):
        match chance.choice(["send", "send", "leave", "give up", "limit", "time"]):
            case "send":
                tasks.append(asyncio.create_task(queue._enter(str(number), chance.randint(-1, 1))))
            case "leave" if queue.inside:
                left += 1
                queue.end(chance.choice([None, 1.0]))
            case "give up" if tasks:
                chance.choice(tasks).cancel()
            case "limit":
                queue.limit = chance.choice([0, 1, 2, 3, None])
                queue.line.update()
            case "time":
                queue.clock.advance(chance.choice([1.0, OUTAGE]))
        if chance.random() < 0.7:
            await settle()
            assert queue.line.running == len(queue.entered) - left
            assert queue.line.waiting <= 5
            assert not queue.line.waiting or (queue.limit is not None and queue.line.running >= queue.limit)
    await queue.set_limit(None)
    assert queue.line.waiting == 0
    for _ in range(queue.line.running):
        queue.end(1.0)
    assert queue.line.is_unused
    assert all(task.done() for task in tasks)
    await asyncio.gather(*tasks, return_exceptions=True)
