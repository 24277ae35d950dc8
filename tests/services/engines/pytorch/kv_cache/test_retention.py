"""Which cached blocks are evicted first: dead ones, then the oldest, and what is retained at last."""

from collections.abc import Sequence

import pytest

from services.engines.prompt import Retain, Session
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.retention import EvictionOrder

LINKS = [bytes([number]) * 16 for number in range(12)]


def filled(chains: Sequence[Sequence[bytes]], share: float = 1.0) -> BlockPool:
    """A pool of as many blocks as these chains have, all of them cached and unused, in this order."""
    pool = BlockPool(1 + sum(map(len, chains)), retained_share=share)
    for chain in chains:
        blocks = pool.allocate(len(chain))
        for block, link in zip(blocks, chain, strict=True):
            pool.store(block, link)
        pool.release(blocks)
    return pool


def is_cached(pool: BlockPool, link: bytes) -> bool:
    return bool(pool.match([link]))


def test_what_is_retained_is_evicted_last_and_by_priority() -> None:
    pool = filled([LINKS[:2], LINKS[2:4], LINKS[4:6]])
    assert pool.retain(LINKS[:2], Retain(60, priority=1)) == 2
    assert pool.retain(LINKS[2:4], Retain(60)) == 2
    pool.allocate(2)
    assert [is_cached(pool, link) for link in LINKS[:6]] == [True] * 4 + [False] * 2
    pool.allocate(2)
    assert [is_cached(pool, link) for link in LINKS[:4]] == [True, True, False, False]
    # A wish: requests take it when there is nothing else.
    pool.allocate(2)
    assert pool.available == 0


def test_retained_blocks_do_not_reduce_what_is_available() -> None:
    pool = filled([LINKS[:4]])
    pool.retain(LINKS[:4], Retain(60))
    assert (pool.available, pool.used) == (4, 0)


def test_a_tenant_retains_no_more_than_its_share() -> None:
    pool = filled([LINKS[:8]], share=0.25)
    assert pool.retain(LINKS[:8], Retain(60, tenant=b"a")) == 2
    assert pool.retain(LINKS[4:8], Retain(60, tenant=b"a")) == 0
    assert pool.retain(LINKS[4:8], Retain(60, tenant=b"b")) == 2
    # What another one retains for as long costs nothing, and what one has is renewed without a further charge.
    assert pool.retain(LINKS[:8], Retain(1, tenant=b"c")) == 4
    assert pool.retain(LINKS[:2], Retain(90, tenant=b"a")) == 2


def test_another_tenant_does_not_lower_a_priority() -> None:
    pool = filled([LINKS[:2], LINKS[2:4]])
    pool.retain(LINKS[:2], Retain(60, priority=5, tenant=b"a"))
    pool.retain(LINKS[2:4], Retain(60, tenant=b"a"))
    pool.retain(LINKS[:2], Retain(90, priority=-10, tenant=b"b"))
    pool.allocate(2)
    assert [is_cached(pool, link) for link in LINKS[:4]] == [True, True, False, False]


def test_an_evicted_block_is_charged_no_longer() -> None:
    pool = filled([LINKS[:2]], share=0.5)
    assert pool.retain(LINKS[:2], Retain(60, tenant=b"a")) == 1
    [first, second] = pool.allocate(2)
    pool.store(first, LINKS[5])
    pool.store(second, LINKS[6])
    assert pool.retain(LINKS[5:7], Retain(60, tenant=b"a")) == 1


def test_what_has_expired_is_evicted_as_the_oldest() -> None:
    hash_of, now = dict(enumerate(LINKS)), [0.0]
    order = EvictionOrder(hash_of, {link: block for block, link in hash_of.items()}, 12, lambda: now[0])
    for block in range(4):
        order.add(block)
    assert order.retain(LINKS[2:4], Retain(10)) == 2
    now[0] = 9.0
    assert order.pop() == 0
    now[0] = 11.0
    assert [order.pop() for _ in range(3)] == [3, 2, 1]


def test_an_ended_session_is_evicted_first_but_not_what_others_have() -> None:
    head, own, other = LINKS[:2], LINKS[2:4], LINKS[4:6]
    pool = filled([head, other, own])
    pool.record(Session(b"one"), [*head, *own])
    pool.record(Session(b"two"), [*head, *other])
    assert pool.end_session(b"one") == 2
    pool.allocate(2)
    assert [is_cached(pool, link) for link in LINKS[:6]] == [True, True, False, False, True, True]
    assert pool.end_session(b"one") == 0


def test_what_was_lent_is_evicted_first_but_not_what_other_sessions_or_requests_have() -> None:
    head, own, other = LINKS[:2], LINKS[2:4], LINKS[4:6]
    pool = filled([other, head, own])
    pool.record(Session(b"one"), [*head, *own])
    pool.record(Session(b"two"), head)
    pool.record(None, other)
    pool.lent([*head, *own])
    pool.lent(other)
    pool.allocate(1)
    assert [is_cached(pool, link) for link in own] == [True, False]
    pool.allocate(1)
    assert [is_cached(pool, link) for link in LINKS[:6]] == [True, True, False, False, True, True]


@pytest.mark.parametrize("is_first", [True, False], ids=["before the session", "after it"])
def test_what_a_request_without_a_session_has_used_stays_when_a_session_ends(*, is_first: bool) -> None:
    system, own = LINKS[:2], LINKS[2:4]
    pool = filled([system, own])
    records = [(None, system), (Session(b"one"), LINKS[:4])]
    for session, links in records if is_first else reversed(records):
        pool.record(session, links)
    assert pool.end_session(b"one") == 2
    pool.allocate(2)
    assert [is_cached(pool, link) for link in LINKS[:4]] == [True, True, False, False]


def test_what_a_forgotten_session_had_stays_when_another_ends() -> None:
    pool = filled([LINKS[:2], LINKS[2:4]])
    pool.record(Session(b"forgotten"), LINKS[:2])
    pool.record(Session(b"one"), LINKS[:4])
    for number in range(4096):
        pool.record(Session(b"one"), LINKS[:4])
        pool.record(Session(number.to_bytes(4, "big")), ())
    assert pool.end_session(b"one") == 2


def test_what_is_remembered_of_requests_without_sessions_is_bounded() -> None:
    pool = filled([LINKS])
    for number in range(1000):
        pool.record(None, [LINKS[0], number.to_bytes(16, "big")])
    assert len(pool._sessions._others) == len(LINKS)
    pool.record(Session(b"one", ends=True), LINKS[:2])
    pool.allocate(1)
    assert [is_cached(pool, link) for link in LINKS[:2]] == [True, False]


def test_what_is_retained_outlives_its_session() -> None:
    pool = filled([LINKS[:2], LINKS[2:4]])
    pool.record(Session(b"one"), LINKS[:2])
    pool.retain(LINKS[:1], Retain(60))
    assert pool.end_session(b"one") == 1
    pool.allocate(3)
    assert is_cached(pool, LINKS[0])


def test_a_part_of_a_session_ends_with_it() -> None:
    pool = filled([LINKS[:2], LINKS[2:4], LINKS[4:5]])
    pool.record(Session(b"part", parent=b"whole"), LINKS[2:4])
    pool.record(Session(b"part of the part", parent=b"part"), LINKS[4:5])
    pool.record(Session(b"whole"), LINKS[:2])
    assert pool.end_session(b"whole") == 5


def test_sessions_that_are_parts_of_each_other_end() -> None:
    pool = filled([LINKS[:1], LINKS[1:2]])
    pool.record(Session(b"a", parent=b"b"), LINKS[:1])
    pool.record(Session(b"b", parent=b"a"), LINKS[1:2])
    assert pool.end_session(b"a") == 2


def test_a_dead_block_that_is_used_again_is_an_ordinary_one() -> None:
    pool = filled([LINKS[:1], LINKS[1:2]])
    pool.record(Session(b"one", ends=True), LINKS[1:2])
    [block] = pool.match(LINKS[1:2])
    pool.share([block])
    pool.release([block])
    pool.allocate(1)
    assert is_cached(pool, LINKS[1])


def test_a_session_leaves_what_its_last_request_no_longer_has() -> None:
    pool = filled([LINKS[:4]])
    pool.record(Session(b"one"), LINKS[:4])
    pool.record(Session(b"one"), LINKS[:2])
    assert pool.end_session(b"one") == 2


def test_what_is_remembered_of_sessions_is_bounded() -> None:
    pool = filled([LINKS])
    for number in range(10_000):
        pool.record(Session(number.to_bytes(4, "big"), parent=b"parent"), LINKS)
    assert len(pool._sessions) == 4  # chains of the whole pool
    for number in range(10_000):
        pool.record(Session(number.to_bytes(4, "big")), LINKS[:0])
    assert len(pool._sessions) == 4096
    assert len(pool._sessions._holders) <= len(LINKS)


def test_the_tenants_that_retain_most_are_known_with_how_much() -> None:
    pool = filled([LINKS[:8]])
    assert pool.retained_by() == []
    seconds = [0.0]
    order = EvictionOrder({}, {link: block for block, link in enumerate(LINKS)}, 12, lambda: seconds[0])
    order.retain(LINKS[:3], Retain(60, tenant=b"a"))
    order.retain(LINKS[3:8], Retain(5, tenant=b"b"))
    assert order.retained_by() == [(b"b", 5), (b"a", 3)]
    order.forget(LINKS[0])
    seconds[0] = 10.0
    assert order.retained_by() == [(b"a", 2)]
