"""The router's picture of a worker's cache, over a stream that loses, repeats and reorders messages."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import pytest
from support.clock import ManualClock

from baton.engine.v1 import worker_pb2
from baton.errors import InvalidReply
from baton.inference.v1.cluster_service_pb2 import MemoryTiers, WorkerLoad
from router.placement.kv_events import EventPace, KvFeed
from router.routing.prefix.kv_index import block_keys
from router.routing.prefix.prefix_caches import Below, Cache, PrefixCaches
from services.control import kv_event
from services.engines.kv_events import KvChanged, KvPublisher, KvRemoved, KvStored, KvTier, in_pieces

CACHE = Cache("worker@1")


def name(number: int) -> bytes:
    return random.Random(number).randbytes(16)


async def messages(
    publisher: KvPublisher, source: random.Random, faults: float
) -> AsyncGenerator[worker_pb2.SubscribeKvEventsResponse, None]:
    """A subscription, some of whose messages are lost, come twice, or come after the next one."""
    sequence, late = 0, []
    async with aclosing(publisher.changes()) as changes:
        async for change in changes:
            for piece in in_pieces(change, most=100):
                message = kv_event(1, sequence, piece)
                sequence += 1
                fault = source.choice(("drop", "twice", "late")) if source.random() < faults else ""
                if fault == "late":
                    late.append(message)
                    continue
                for _ in range({"drop": 0, "twice": 2}.get(fault, 1)):
                    yield message
                while late:
                    yield late.pop()


async def follow(publisher: KvPublisher, caches: PrefixCaches, source: random.Random, faults: list[float]) -> None:
    while True:
        feed = KvFeed(CACHE.process, 1, caches)
        with suppress(InvalidReply):
            async with aclosing(messages(publisher, source, faults[0])) as stream:
                async for message in stream:
                    feed.apply(message)


@pytest.mark.parametrize("seed", range(4))
async def test_the_index_converges_although_one_message_in_twenty_is_lost_repeated_or_late(seed: int) -> None:
    source = random.Random(seed)
    publisher, caches, held = KvPublisher(heartbeat_seconds=0.005), PrefixCaches(), {name(0)}
    publisher.stored(name(0))
    faults = [0.05]
    following = asyncio.create_task(follow(publisher, caches, source, faults))
    for _ in range(1500):
        for number in (source.randrange(600) for _ in range(source.randrange(1, 6))):
            if name(number) in held:
                held.discard(name(number))
                publisher.removed(name(number))
            else:
                held.add(name(number))
                publisher.stored(name(number))
        await asyncio.sleep(0)
    for _ in range(400):
        await asyncio.sleep(0.01)
        found = {number for number in range(600) if caches.match(block_keys([name(number)]))}
        if found == {number for number in range(600) if name(number) in held}:
            break
    else:
        raise AssertionError(f"{len(found)} blocks are known, and {len(held)} are held")
    assert caches.num_blocks(CACHE) == len(held)
    following.cancel()


def test_a_message_of_another_epoch_is_refused() -> None:
    caches = PrefixCaches()
    feed = KvFeed("worker@2", 2, caches)
    assert not feed.apply(worker_pb2.SubscribeKvEventsResponse(epoch=1))
    assert not caches.reports("worker@2")


def test_one_worker_s_messages_take_a_part_of_the_event_loop_only() -> None:
    pace, now = EventPace(), 1000.0
    for _ in range(10_000):
        now += pace.seconds_after(20, now)
    assert 8 < now - 1000.0 < 10
    assert EventPace().seconds_after(18_000, now) == 0


def prompt(seed: int, blocks: int) -> list[bytes]:
    return [name(seed * 1000 + index) for index in range(blocks)]


def test_a_prompt_counts_as_cached_at_once_and_no_more_if_the_worker_never_tells_of_it() -> None:
    clock = ManualClock()
    caches = PrefixCaches(clock)
    keys = block_keys(prompt(1, 10))
    caches.replace(CACHE, keys[:2])
    caches.expect(CACHE, keys[2:], seconds=1.0)
    assert caches.match(keys) == {CACHE: 10}
    caches.store(CACHE, keys[2:4])
    clock.advance(60.0)
    assert caches.match(keys) == {CACHE: 4}


def test_a_snapshot_does_not_take_back_what_is_still_expected() -> None:
    caches = PrefixCaches(ManualClock())
    keys = block_keys(prompt(1, 10))
    caches.expect(CACHE, keys, seconds=1.0)
    caches.replace(CACHE, keys[:2])
    assert caches.match(keys) == {CACHE: 10}


def test_a_cache_that_does_not_tell_is_believed_to_hold_no_more_than_it_can() -> None:
    caches = PrefixCaches(ManualClock())
    first, second = block_keys(prompt(1, 10)), block_keys(prompt(2, 10))
    caches.expect(CACHE, first, seconds=1.0, most_blocks=15)
    caches.expect(CACHE, second, seconds=1.0, most_blocks=15)
    assert caches.num_blocks(CACHE) == 15
    assert caches.match(second) == {CACHE: 10}


def test_a_cache_that_had_less_than_was_believed_is_corrected() -> None:
    caches = PrefixCaches(ManualClock())
    keys = block_keys(prompt(1, 10))
    caches.expect(CACHE, keys, seconds=1.0)
    caches.correct(CACHE, keys[3:])
    assert caches.match(keys) == {CACHE: 3}


def test_expected_blocks_count_after_reported_ones_and_before_them() -> None:
    caches = PrefixCaches(ManualClock())
    keys = block_keys(prompt(1, 10))
    caches.replace(CACHE, [*keys[:3], *keys[6:8]])
    caches.expect(CACHE, keys[3:6], seconds=1.0)
    assert caches.match(keys) == {CACHE: 8}
    caches.remove(CACHE, keys[2:3])
    assert caches.match(keys) == {CACHE: 2}


def test_a_worker_that_has_gone_is_forgotten() -> None:
    caches = PrefixCaches(ManualClock())
    keys = block_keys(prompt(1, 10))
    caches.replace(CACHE, keys)
    caches.expect(Cache(CACHE.process, 1), keys, seconds=1.0)
    caches.drop(CACHE.process)
    assert caches.match(keys) == {}
    assert not caches.reports(CACHE.process)


async def test_the_tiers_of_blocks_are_known_from_the_snapshot_on() -> None:
    publisher, caches = KvPublisher(heartbeat_seconds=0.001), PrefixCaches(ManualClock())
    for number in range(10):
        tier = KvTier.DEVICE if number < 4 else KvTier.HOST if number < 7 else KvTier.DISK
        publisher.stored(name(number), tier=tier)
    keys = block_keys([name(number) for number in range(10)])
    feed, sequence = KvFeed(CACHE.process, 1, caches), 0
    async with aclosing(publisher.changes()) as changes:
        for _ in range(3):
            for piece in in_pieces(await anext(changes), most=2):
                feed.apply(kv_event(1, sequence, piece))
                sequence += 1
    assert caches.match(keys) == {CACHE: 10}
    assert caches.below(keys, {CACHE: 10}) == {CACHE: Below(3, 3)}


async def test_blocks_that_move_between_tiers_are_followed() -> None:
    publisher, caches = KvPublisher(heartbeat_seconds=0.001), PrefixCaches(ManualClock())
    keys = block_keys([name(number) for number in range(6)])
    feed, sequence = KvFeed(CACHE.process, 1, caches), 0
    async with aclosing(publisher.changes()) as changes:

        async def follow_one() -> None:
            nonlocal sequence
            for piece in in_pieces(await anext(changes)):
                feed.apply(kv_event(1, sequence, piece))
                sequence += 1

        await follow_one()
        for number in range(6):
            publisher.stored(name(number))
        await follow_one()
        assert caches.below(keys, caches.match(keys)) == {}
        publisher.stored(name(5), tier=KvTier.DISK)
        publisher.stored(name(4), tier=KvTier.HOST)
        await follow_one()
        assert caches.below(keys, caches.match(keys)) == {CACHE: Below(1, 1)}
        publisher.stored(name(4))
        publisher.removed(name(5))
        await follow_one()
        assert caches.match(keys) == {CACHE: 5}
        assert caches.below(keys, {CACHE: 5}) == {}


def test_blocks_without_a_tier_are_in_the_pool() -> None:
    caches = PrefixCaches(ManualClock())
    stored = worker_pb2.KvBlocksStored(block_hashes=[name(1)])
    KvFeed(CACHE.process, 1, caches).apply(worker_pb2.SubscribeKvEventsResponse(epoch=1, stored=stored))
    keys = block_keys([name(1)])
    assert caches.match(keys) == {CACHE: 1}
    assert caches.below(keys, {CACHE: 1}) == {}


def test_a_reader_without_tiers_still_counts_a_block_that_moved_as_cached() -> None:
    """Such a reader knows the fields `stored` and `removed` of a change alone."""
    change = KvChanged(0, (), (), (KvStored(0, (name(1),), KvTier.HOST),))
    message = kv_event(1, 0, change)
    assert list(message.changed.stored) == list(message.changed.removed) == []
    assert kv_event(1, 0, KvStored(0, (name(1),), KvTier.HOST)).stored.block_hashes == [name(1)]


def test_more_moved_blocks_than_a_message_may_have_are_refused_whatever_their_tiers() -> None:
    caches = PrefixCaches()
    moved = [worker_pb2.KvBlocksStored(block_hashes=[name(0)] * 2049, tier=worker_pb2.KV_TIER_HOST) for _ in range(2)]
    message = worker_pb2.SubscribeKvEventsResponse(epoch=1, changed=worker_pb2.KvBlocksChanged(moved=moved))
    with pytest.raises(InvalidReply, match="a message has 4098 blocks"):
        KvFeed(CACHE.process, 1, caches).apply(message)
    assert caches.num_blocks(CACHE) == 0


def stored_on_disk(feed: KvFeed, blocks: int) -> None:
    change = KvStored(0, tuple(name(number) for number in range(blocks)), KvTier.DISK)
    for sequence, piece in enumerate(in_pieces(change, most=1000)):
        feed.apply(kv_event(1, sequence, piece))


def test_a_disk_of_over_64_times_the_pool_is_believed_if_the_worker_reports_its_size() -> None:
    caches = PrefixCaches()
    load = WorkerLoad(blocks_total=10, memory=MemoryTiers(host_blocks_total=20, disk_blocks_total=1000))
    stored_on_disk(KvFeed(CACHE.process, 1, caches, load=lambda: load), 640 + 20 + 1000)
    assert caches.num_blocks(CACHE) == 1660


@pytest.mark.parametrize("memory", [None, MemoryTiers(host_blocks_total=20, disk_blocks_total=1000)])
def test_more_blocks_than_a_worker_reports_room_for_are_not_believed(memory: MemoryTiers | None) -> None:
    load = WorkerLoad(blocks_total=10, memory=memory)
    most = 640 + (1020 if memory else 0)
    with pytest.raises(InvalidReply, match=f"more than {most} blocks: the worker's pool has 10"):
        stored_on_disk(KvFeed(CACHE.process, 1, PrefixCaches(), load=lambda: load), most + 1)


def test_the_ranks_of_a_worker_have_room_for_so_many_blocks_together() -> None:
    caches, load = PrefixCaches(), WorkerLoad(blocks_total=10)

    def follow(rank: int) -> None:
        feed = KvFeed(CACHE.process, 1, caches, ranks=8, load=lambda: load)
        change = KvStored(rank, tuple(name(number) for number in range(400)), KvTier.DEVICE)
        for sequence, piece in enumerate(in_pieces(change, most=1000)):
            feed.apply(kv_event(1, sequence, piece))

    follow(0)
    follow(0)
    with pytest.raises(InvalidReply, match="more than 640 blocks"):
        follow(1)
    caches.drop(CACHE.process)
    follow(1)


def test_the_blocks_of_a_tier_that_has_failed_are_believed_until_they_are_reported_as_gone() -> None:
    load = WorkerLoad(blocks_total=10, memory=MemoryTiers(disk_blocks_total=1000))
    caches = PrefixCaches()
    feed = KvFeed(CACHE.process, 1, caches, load=lambda: load)
    stored_on_disk(feed, 1500)
    load.memory.disk_blocks_total = 0
    feed.apply(kv_event(1, 2, KvRemoved(0, (name(0),))))
    assert caches.num_blocks(CACHE) == 1499
