"""Changes of a prefix cache reach readers merged, in pieces, and in bounded memory."""

from contextlib import aclosing

import pytest

from services.engines import kv_events
from services.engines.kv_events import KvChanged, KvPublisher, KvRemoved, KvSnapshot, KvStored, in_pieces


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def test_a_reader_gets_snapshots_of_all_ranks_and_then_merged_changes() -> None:
    publisher = KvPublisher(ranks=2)
    publisher.stored(name(1), rank=1)
    async with aclosing(publisher.changes()) as changes:
        assert [await anext(changes), await anext(changes)] == [KvSnapshot(0, ()), KvSnapshot(1, (name(1),))]
        publisher.stored(name(2), rank=1)
        publisher.stored(name(3), rank=1)
        publisher.removed(name(2), rank=1)
        publisher.removed(name(1), rank=1)
        assert await anext(changes) == KvChanged(1, (name(3),), (name(2), name(1)))


async def test_a_reader_that_is_too_slow_gets_a_snapshot_and_keeps_no_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MAX_WAITING", 10)
    publisher = KvPublisher()
    async with aclosing(publisher.changes()) as changes:
        await anext(changes)
        for number in range(5, 1000):
            publisher.stored(name(number))
            publisher.removed(name(number - 5))
            assert all(len(reader.waiting[0]) <= 10 for reader in publisher._readers)
        assert await anext(changes) == KvSnapshot(0, tuple(name(number) for number in range(995, 1000)))


async def test_an_idle_reader_hears_that_nothing_has_changed() -> None:
    publisher = KvPublisher(heartbeat_seconds=0.01)
    async with aclosing(publisher.changes()) as changes:
        await anext(changes)
        assert await anext(changes) == KvChanged(0, (), ())


def test_large_changes_come_in_pieces() -> None:
    many = tuple(name(number) for number in range(10))
    assert list(in_pieces(KvSnapshot(1, many), most=4)) == [
        KvSnapshot(1, many[:4]),
        KvStored(1, many[4:8]),
        KvStored(1, many[8:]),
    ]
    assert list(in_pieces(KvChanged(0, many[:3], many[3:]), most=4)) == [
        KvRemoved(0, many[3:7]),
        KvRemoved(0, many[7:]),
        KvStored(0, many[:3]),
    ]
    assert list(in_pieces(KvSnapshot(0, ()), most=4)) == [KvSnapshot(0, ())]
