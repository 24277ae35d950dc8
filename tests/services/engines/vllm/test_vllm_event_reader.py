"""The reader of vLLM's KV events, on real ZeroMQ sockets that speak vLLM's format: gaps, replays, duplicates."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from support.clients.scraping import sample
from support.engines.event_publisher import Publisher
from support.eventually import eventually

from engine_protocol.prefix_hash import block_hash, root_hash
from services.engines.external import event_reader
from services.engines.external.event_reader import EventReader, event_sockets
from services.engines.kv_events import KvSnapshot
from services.engines.vllm.monitoring.kv_events import vllm_format

SIZE = 4
GAPS = "baton_vllm_kv_event_gaps_total"


def stored(number: int) -> dict[str, Any]:
    """A block that begins a prompt, as vLLM reports it."""
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [number] * SIZE,
        "block_size": SIZE,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(number: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}


@asynccontextmanager
async def reading(publisher: Publisher) -> AsyncIterator[EventReader]:
    with event_sockets(1) as endpoints:
        async with (
            publisher.open(endpoints.events, endpoints.replay),
            EventReader(endpoints, 1, vllm_format(SIZE)) as reader,
        ):
            await publisher.subscribed()
            await eventually(lambda: bool(publisher.demands))
            yield reader


def held(reader: EventReader) -> set[bytes]:
    return set(reader._publisher._held[0])


def hashes(*numbers: int) -> set[bytes]:
    return {block_hash(root_hash(""), [number] * SIZE) for number in numbers}


async def test_blocks_of_before_the_subscription_and_after_it_are_read() -> None:
    publisher = Publisher()
    publisher.lose(stored(1), stored(2))
    publisher.lose(removed(1))
    async with reading(publisher) as reader:
        await publisher.publish(stored(3))
        await eventually(lambda: held(reader) == hashes(2, 3))
        async with aclosing(reader.kv_changes()) as changes:
            snapshot = await anext(changes)
        assert isinstance(snapshot, KvSnapshot)
        assert set(snapshot.block_hashes) == hashes(2, 3)
        assert publisher.demands == [0]


async def test_lost_events_are_asked_for_again_and_are_no_gap() -> None:
    publisher, before = Publisher(), sample(GAPS)
    async with reading(publisher) as reader:
        await publisher.publish(stored(1))
        await eventually(lambda: held(reader) == hashes(1))
        publisher.lose(stored(2))
        publisher.lose(removed(1))
        await publisher.publish(stored(4))
        await eventually(lambda: held(reader) == hashes(2, 4))
        assert publisher.demands == [0, 1]
    assert sample(GAPS) == before


async def test_after_events_that_vllm_has_no_more_all_earlier_blocks_are_forgotten() -> None:
    publisher, before = Publisher(kept=2), sample(GAPS)
    async with reading(publisher) as reader:
        await publisher.publish(stored(1))
        await eventually(lambda: held(reader) == hashes(1))
        for _ in range(5):
            publisher.lose(removed(1))
        await publisher.publish(stored(2))
        await eventually(lambda: held(reader) == hashes(2))
        await publisher.publish(stored(3))
        await eventually(lambda: held(reader) == hashes(2, 3))
    assert sample(GAPS) == before + 1


async def test_events_that_come_twice_are_read_once() -> None:
    publisher = Publisher()
    async with reading(publisher) as reader:
        await publisher.publish(stored(1))
        await publisher.publish(removed(1), stored(2))
        for number in (0, 0, 1, 0):
            await publisher.send(number)
        await publisher.publish(stored(3))
        await eventually(lambda: bool(hashes(3) & held(reader)))
        assert held(reader) == hashes(2, 3)
        assert publisher.demands == [0]


async def test_a_replay_that_never_ends_is_a_gap_and_the_reader_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_reader, "_REPLAY_SECONDS", 0.2)
    publisher, before = Publisher(), sample(GAPS)
    async with reading(publisher) as reader:
        await publisher.publish(stored(1))
        await eventually(lambda: held(reader) == hashes(1))
        publisher.answers = False
        publisher.lose(stored(2))
        await publisher.publish(stored(3))
        await eventually(lambda: held(reader) == hashes(3))
    assert sample(GAPS) == before + 1


HALF = {key: value for key, value in stored(2).items() if key != "token_ids"}


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.5, [HALF], 0])])
async def test_events_that_cannot_be_read_are_a_gap_and_the_reader_goes_on(payload: bytes) -> None:
    publisher, before = Publisher(), sample(GAPS)
    async with reading(publisher) as reader:
        await publisher.publish(stored(1))
        await eventually(lambda: held(reader) == hashes(1))
        publisher.lose()
        await publisher.send(1, payload)
        await publisher.publish(stored(3))
        await eventually(lambda: held(reader) == hashes(3))
    assert sample(GAPS) == before + 1


def ranks_of(endpoints: Sequence[str]) -> list[int]:
    return [int(endpoint.rpartition(":")[2]) for endpoint in endpoints]


def test_each_of_several_ranks_has_ports_of_its_own() -> None:
    with event_sockets(3) as first:
        offsets = [event_reader._offset(first, rank) for rank in range(3)]
    events, replays = ranks_of([one.events for one in offsets]), ranks_of([one.replay for one in offsets])
    assert len({*events, *replays}) == 6
    assert [port - events[0] for port in events] == [port - replays[0] for port in replays] == [0, 1, 2]
