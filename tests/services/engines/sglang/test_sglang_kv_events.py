"""SGLang's KV events in our hash chain, from bytes that SGLang 0.5.16 encoded; without SGLang."""

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.clients.scraping import sample
from support.engines.event_publisher import Publisher
from support.eventually import eventually

from engine_protocol.prefix_hash import block_hashes
from services.engines.external.event_reader import EventReader, event_sockets
from services.engines.sglang.inside.kv_events import tell_salts
from services.engines.sglang.kv_events import read_event, sglang_format

SIZE = 4
GAPS = "baton_sglang_kv_event_gaps_total"
# Its RadixCache with pages of 4: 0..7, the same with the salt "tenant", and 0..3 with four times 9.
STORED = bytes.fromhex(
    "93cb3ff80000000000009691b0416c6c426c6f636b73436c656172656498ab426c6f636b53746f72656491d3baed642339816affc09400010203"
    "04c0a3475055a098ab426c6f636b53746f72656491cf01414b052706d93bd3baed642339816aff940405060704c0a3475055a098ab426c6f636b"
    "53746f72656491cf2b66f286f3ebdacfc0940001020304c0a3475055a674656e616e7498ab426c6f636b53746f72656491d3f1c455c8bb18bdb7"
    "cf2b66f286f3ebdacf940405060704c0a3475055a674656e616e7498ab426c6f636b53746f72656491cf62a3cef82078742dd3baed642339816a"
    "ff940909090904c0a3475055a000"
)
# The salted chain was evicted.
REMOVED = msgspec.msgpack.encode([2.5, [["BlockRemoved", [3127453652687248079, -1025600494512849481], "GPU"]], 0])
CHAIN = list(range(8))
FORKED = [0, 1, 2, 3, 9, 9, 9, 9]


def stored(number: int, *, salt: tuple[str, ...] = ("",), size: int = SIZE, medium: str = "GPU") -> list[Any]:
    """A block that begins a chain; without a salt it is as SGLang's own."""
    return ["BlockStored", [number], None, [number] * size, size, None, medium, *salt]


@asynccontextmanager
async def reading(publisher: Publisher) -> AsyncIterator[EventReader]:
    with event_sockets(1) as endpoints:
        reader = EventReader(endpoints, 1, sglang_format(SIZE))
        async with publisher.open(endpoints.events, endpoints.replay), reader:
            await publisher.subscribed()
            await eventually(lambda: bool(publisher.demands))
            yield reader


def held(reader: EventReader) -> set[bytes]:
    return set(reader._publisher._held[0])


def chains(*tokens: list[int], salt: str = "") -> set[bytes]:
    return {each for one in tokens for each in block_hashes(one, SIZE, salt)}


async def test_chains_with_and_without_a_salt_are_held_apart_and_removed_apart() -> None:
    publisher = Publisher()
    async with reading(publisher) as reader:
        await publisher.send(0, STORED)
        await eventually(lambda: held(reader) == chains(CHAIN, FORKED) | chains(CHAIN, salt="tenant"))
        await publisher.send(1, REMOVED)
        await eventually(lambda: held(reader) == chains(CHAIN, FORKED))
        await publisher.send(2, msgspec.msgpack.encode([3.5, [["AllBlocksCleared"]], 0]))
        await eventually(lambda: held(reader) == set())


@pytest.mark.parametrize(
    "event",
    [
        stored(1, salt=()),
        stored(1, medium="CPU_PINNED"),
        stored(1, size=8),
        ["BlockStored", [1], None, [1] * SIZE, SIZE, 3, "GPU", ""],
        ["BlockStored", [1], None, [[1, 2]] * 2, SIZE, None, "GPU", ""],
        ["BlockStored", [1], None, [1] * SIZE, SIZE, None],
        ["BlockRemoved", [1], "DISK"],
    ],
    ids=["no salt", "host memory", "another size", "an adapter", "a page that is not whole", "old", "disk"],
)
def test_blocks_that_no_prompt_of_a_known_salt_has_are_left_out(event: list[Any]) -> None:
    assert read_event(SIZE, event) is None


async def test_a_block_behind_one_that_was_left_out_is_left_out() -> None:
    publisher = Publisher()
    async with reading(publisher) as reader:
        await publisher.publish(
            stored(1, salt=()), ["BlockStored", [2], 1, [2] * SIZE, SIZE, None, "GPU", ""], stored(3)
        )
        await eventually(lambda: held(reader) == chains([3] * SIZE))


@pytest.mark.parametrize("event", [7, [], ["BlockStored"], ["Unknown", [1]], {"type": "BlockStored"}, "BlockStored"])
async def test_events_that_cannot_be_read_are_a_gap_and_the_reader_goes_on(event: object) -> None:
    publisher, before = Publisher(), sample(GAPS)
    async with reading(publisher) as reader:
        await publisher.publish(stored(1))
        await eventually(lambda: held(reader) == chains([1] * SIZE))
        await publisher.publish(event)
        await publisher.publish(stored(3))
        await eventually(lambda: held(reader) == chains([3] * SIZE))
    assert sample(GAPS) == before + 1


async def test_lost_events_are_asked_for_again_and_are_no_gap() -> None:
    publisher, before = Publisher(), sample(GAPS)
    async with reading(publisher) as reader:
        await publisher.publish(stored(1))
        publisher.lose(stored(2))
        await publisher.publish(stored(3))
        await eventually(lambda: held(reader) == chains([1] * SIZE, [2] * SIZE, [3] * SIZE))
    assert sample(GAPS) == before


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The fields of SGLang's class."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


def changed_cache() -> Any:
    """A radix cache of one page a node, whose events are as SGLang's."""

    class Cache:
        page_size = SIZE

        def __init__(self) -> None:
            self.root_node = SimpleNamespace(hash_value=[])
            self.enable_kv_cache_events = True
            self.kv_event_queue: list[Any] = []

        def _record_store_event(self, node: Any, medium: str | None = None) -> None:
            node.hash_value = node.hash_value or hashes(node.key, "", self.page_size)
            parent = next(iter(node.parent.hash_value), None)
            event = BlockStored(node.hash_value, parent, node.key.tokens, SIZE, None, medium or "GPU")
            self.kv_event_queue.append(event)

    def hashes(key: Any, prior: str, page_size: int) -> list[int]:
        return [zlib.crc32(f"{prior} {key.tokens}".encode())]

    tell_salts(Cache, BlockStored, hashes)
    return Cache()


def test_equal_pages_of_other_salts_have_other_hashes_and_tell_their_salts() -> None:
    cache = changed_cache()
    for salt in (None, "tenant", None):
        key = SimpleNamespace(tokens=[1] * SIZE, extra_key=salt)
        cache._record_store_event(node := SimpleNamespace(key=key, parent=cache.root_node, hash_value=None))
        behind = SimpleNamespace(tokens=[2] * SIZE, extra_key=salt)
        cache._record_store_event(SimpleNamespace(key=behind, parent=node, hash_value=None))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(cache.kv_event_queue))
    assert [each[7] for each in told] == ["", "", "tenant", "tenant", "", ""]
    assert told[0] == told[4] != told[2]
    assert told[0][1] != told[2][1]
    assert [each[2] for each in told] == [None, told[0][1][0], None, told[2][1][0], None, told[0][1][0]]


def test_without_events_nothing_is_recorded() -> None:
    cache = changed_cache()
    cache.enable_kv_cache_events = False
    key = SimpleNamespace(tokens=[1] * SIZE, extra_key="tenant")
    cache._record_store_event(SimpleNamespace(key=key, parent=cache.root_node, hash_value=None))
    assert cache.kv_event_queue == []
