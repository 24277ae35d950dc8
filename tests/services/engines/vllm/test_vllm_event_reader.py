"""The reader of vLLM's KV events, on real ZeroMQ sockets that speak vLLM's format: gaps, replays, duplicates."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from support.clients.scraping import sample
from support.eventually import eventually

from engine_protocol.prefix_hash import block_hash, root_hash
from services.engines.kv_events import KvSnapshot
from services.engines.vllm.monitoring import event_reader
from services.engines.vllm.monitoring.event_reader import EventReader, event_sockets

SIZE = 4
GAPS = "baton_vllm_kv_event_gaps_total"
END = (-1).to_bytes(8, "big", signed=True)


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


class Publisher:
    """vLLM's `ZmqEventPublisher` on the wire: batches numbered from 0, and those it still has on demand.

    A batch has no number of its own but its frame's: topic, number, `[time, events, rank]`. A demand names the first
    number; the answers end with the number -1.
    """

    def __init__(self, kept: int = 100) -> None:
        self._kept = kept
        self._buffer: list[bytes] = []
        self.demands: list[int] = []
        self.answers = True

    @asynccontextmanager
    async def open(self, events: str, replay: str) -> AsyncIterator["Publisher"]:
        context = zmq.asyncio.Context()
        self._out, self._demanded = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._out.bind(events)
        self._demanded.bind(replay)
        answering = asyncio.create_task(self._answer())
        try:
            yield self
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Waits for the reader's subscription."""
        assert await asyncio.wait_for(self._out.recv(), 60) == b"\x01"

    def lose(self, *events: dict[str, Any]) -> None:
        """A batch that does not arrive, as if the socket's queue were full."""
        self._buffer.append(msgspec.msgpack.encode([1.5, events, 0]))

    async def publish(self, *events: dict[str, Any]) -> None:
        self.lose(*events)
        await self.send(len(self._buffer) - 1)

    async def send(self, number: int, payload: bytes | None = None) -> None:
        frames = [b"", number.to_bytes(8, "big"), self._buffer[number] if payload is None else payload]
        await self._out.send_multipart(frames)

    async def _answer(self) -> None:
        while True:
            client, empty, start = await self._demanded.recv_multipart()
            self.demands.append(first := int.from_bytes(start, "big"))
            if not self.answers:
                continue
            for number in range(max(first, len(self._buffer) - self._kept), len(self._buffer)):
                frames = [client, empty, number.to_bytes(8, "big"), self._buffer[number]]
                await self._demanded.send_multipart(frames)
            await self._demanded.send_multipart([client, empty, END, b""])


@asynccontextmanager
async def reading(publisher: Publisher) -> AsyncIterator[EventReader]:
    with event_sockets(1) as endpoints:
        async with publisher.open(endpoints.events, endpoints.replay), EventReader(endpoints, 1, SIZE) as reader:
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
        async with aclosing(reader.changes()) as changes:
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
