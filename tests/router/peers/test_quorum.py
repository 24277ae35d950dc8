"""Promises of routers: which count, which do not, and what others tell."""

import math
from dataclasses import replace

import pytest
from support.clock import ManualClock
from support.router.demand import fleet
from support.router.fleets import record

from baton.engine.v1 import peer_pb2
from baton.errors import InvalidReply
from router.peers.link import check_promise
from router.peers.membership import RegisteredPeers
from router.peers.quorum import PROMISE_SECONDS, Quorum

TENANTS = [f"tenant {number}" for number in range(40)]
OTHERS = ("r1", "r2")


def promise(*routers: str, **fields: object) -> peer_pb2.PromiseResponse:
    made = peer_pb2.PromiseResponse(
        routers=routers, seconds=PROMISE_SECONDS, age_seconds=10.0, changes=1, knows_caller=True
    )
    made.MergeFrom(peer_pb2.PromiseResponse(**fields))  # type: ignore[arg-type]
    return made


def of_three(clock: ManualClock) -> Quorum:
    """r0 as it sees r1 and r2, which know it, and have promised nothing yet."""
    quorum = Quorum("r0", clock)
    quorum.set_members(("r0", *OTHERS))
    for name in OTHERS:
        quorum.take(name, peer_pb2.PromiseResponse(knows_caller=True), clock())
    quorum.note_awake()
    return quorum


def test_a_router_lends_with_the_promises_of_more_than_half() -> None:
    quorum = of_three(clock := ManualClock())
    assert quorum.lends_since("acme") is None
    quorum.take("r1", promise("r0"), clock())
    assert quorum.lends_since("acme") == clock()
    clock.advance(PROMISE_SECONDS)
    quorum.note_awake()
    assert quorum.lends_since("acme") is None


def test_a_promise_counts_from_when_it_was_asked_for() -> None:
    quorum = of_three(clock := ManualClock())
    asked_at = clock()
    clock.advance(0.5)
    quorum.note_awake()
    quorum.take("r1", promise("r0"), asked_at)
    assert quorum.lends_since("acme") is not None
    clock.advance(PROMISE_SECONDS - 0.5)
    assert quorum.lends_since("acme") is None


def test_a_router_that_others_may_not_know_yet_lends_and_promises_nothing() -> None:
    clock = ManualClock()
    quorum = Quorum("r0", clock)
    quorum.set_members(("r0", *OTHERS))
    quorum.note_awake()
    quorum.take("r1", promise("r0"), clock())
    assert quorum.answer("r1").seconds == 0
    assert quorum.lends_since("acme") is None
    quorum.take("r2", promise("r0", "r2"), clock())
    assert quorum.answer("r1").seconds > 0
    assert quorum.lends_since("acme") is not None


def test_a_router_lends_nothing_before_it_has_seen_its_own_record() -> None:
    """Others that it has not seen may lend by then."""
    peers = _peers("r0", ManualClock())
    assert peers.lends_since("acme") is None
    peers.update([])
    assert peers.lends_since("acme") is None
    peers.update([record("r0")])
    assert peers.lends_since("acme") == -math.inf


@pytest.mark.parametrize("first", [(), ("r1",)])
def test_of_two_routers_that_start_at_once_one_lends(first: tuple[str, ...]) -> None:
    """Both have seen no record or one when they are registered; the view that has both comes late to one of them."""
    early, late = _peers("r1", clock := ManualClock()), _peers("r0", clock)
    early.update([])
    late.update(map(record, first))
    early.update([record("r1")])
    late.update([record("r0"), record("r1")])
    assert all(early.lends_since(tenant) is not None and late.lends_since(tenant) is None for tenant in TENANTS)
    early.update([record("r0"), record("r1")])
    late.quorum.take("r1", early.quorum.answer("r0"), clock())
    lends = [(early.lends_since(tenant) is not None, late.lends_since(tenant)) for tenant in TENANTS]
    assert set(lends) == {(True, None), (False, clock())}


def test_a_router_that_is_registered_again_waits_until_the_other_one_knows() -> None:
    """The other one, which has lent alone meanwhile, sees the new record late."""
    other, again = _peers("r1", clock := ManualClock()), _peers("r0", clock)
    for one in (other, again):
        one.update([record("r0"), record("r1")])
    other.quorum.take("r0", again.quorum.answer("r1"), clock())
    again.quorum.take("r1", other.quorum.answer("r0"), clock())
    for one in (other, again):
        one.update([record("r1")])
    clock.advance(2 * PROMISE_SECONDS)
    assert all(other.lends_since(tenant) is not None for tenant in TENANTS)
    asked_at = clock()
    clock.advance(0.01)
    again.update([record("r0"), record("r1")])
    again.quorum.take("r1", peer_pb2.PromiseResponse(knows_caller=True), asked_at)
    for _ in range(4):
        again.quorum.note_awake()
        other.quorum.note_awake()
        clock.advance(PROMISE_SECONDS / 2)
        assert all(again.lends_since(tenant) is None for tenant in TENANTS if other.lends_since(tenant) is not None)


def _peers(name: str, clock: ManualClock) -> RegisteredPeers:
    peers = RegisteredPeers(record(name), lambda other: _Link(other), clock)  # type: ignore[arg-type, return-value]
    peers.quorum.is_registered = lambda: True
    return peers


def test_strangers_are_promised_nothing_and_their_promises_do_not_count() -> None:
    quorum = of_three(clock := ManualClock())
    assert quorum.answer("stranger") == peer_pb2.PromiseResponse()
    for number in range(100):
        quorum.take(f"stranger {number}", promise("r0"), clock())
    assert quorum.lends_since("acme") is None
    assert len(quorum._views) == 1


def test_a_router_that_joins_keeps_the_promise_for_tenants_that_stay() -> None:
    """Its promise says who will join, so that nobody has to ask again in that moment."""
    quorum = of_three(clock := ManualClock())
    stays = next(name for name in TENANTS if quorum._choose(name, frozenset(("r0", "r2"))) == "r0")
    moves = next(name for name in TENANTS if quorum._choose(name, frozenset(("r0", "r2"))) == "r2")
    quorum.take("r1", promise("r0", joining=["r2"], joins_seconds=0.3), clock())
    assert quorum.lends_since(stays) is not None
    assert quorum.lends_since(moves) is not None
    clock.advance(0.3)
    quorum.note_awake()
    assert quorum.lends_since(stays) is not None
    assert quorum.lends_since(moves) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": math.nan},
        {"seconds": -1.0},
        {"joins_seconds": math.inf},
        {"age_seconds": 2.0**60},
        {"joining": [f"r{number}" for number in range(2000)]},
        {"joining": ["r" * 1000]},
    ],
)
def test_what_no_router_promises_is_an_invalid_reply(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidReply):
        check_promise(peer_pb2.PromiseResponse(**wrong))  # type: ignore[arg-type]


def test_a_router_that_tells_other_names_each_time_costs_no_memory() -> None:
    quorum = of_three(clock := ManualClock())
    for number in range(1, 200):
        names = [f"made up {number} {each}" for each in range(50)]
        quorum.take("r1", promise(*names, changes=number), clock())
        assert quorum.lends_since("acme") is None
    assert len(quorum._known) <= 3 + 32 * 50


def test_a_router_that_tells_as_many_names_as_it_may_each_time_costs_little_memory() -> None:
    quorum = of_three(clock := ManualClock())
    for number in range(1, 40):
        names = [f"made up {number} {each}" for each in range(1000)]
        quorum.take("r1", promise(*names, changes=number), clock())
    assert len(quorum._known) <= 5000
    for tenant in range(1000):
        quorum.lenders(f"tenant {tenant}")
    assert sum(map(len, quorum._ranks.values())) <= 2**20


def test_routers_of_versions_without_promises_are_not_counted() -> None:
    peers = _peers("r0", ManualClock())
    old = [replace(record(f"old{number}"), capabilities=()) for number in range(5)]
    newer = replace(record("r1"), capabilities=("quotas", "of a later version"))
    peers.update([record("r0"), newer, *old])
    assert peers.quorum._members == ("r0", "r1")
    assert peers.count == 7


class _Link:
    def __init__(self, other: object) -> None:
        self.record = other

    def close(self) -> None:
        pass


def test_forty_routers_lend_all_tenants_and_each_by_one() -> None:
    which = fleet(40)
    which.clock.advance(10.0)
    for tenant in TENANTS:
        assert sum(one.peers.lends_since(tenant) is not None for one in which.routers.values()) == 1


def test_who_is_told_of_a_first_view_can_read_it_at_once() -> None:
    peers = RegisteredPeers(record("a"), lambda other: _Link(other), ManualClock())  # type: ignore[arg-type, return-value]
    seen = list[tuple[int, bool]]()
    peers.changed = lambda: seen.append((peers.count, peers.knows_others))
    peers.update([record("b")])  # before the registry shows its own record
    peers.update([record("a"), record("b")])
    assert seen[-1] == (2, True)
