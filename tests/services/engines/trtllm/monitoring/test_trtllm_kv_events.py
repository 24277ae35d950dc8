"""KV events of TensorRT-LLM for routers: with Baton's hashes, in order, and only of blocks that are
certainly cached.
"""

from typing import Any

import pytest

from engine_protocol.prefix_hash import block_hash, root_hash
from services.engines.kv_events import KvChange, KvRemoved, KvSnapshot, KvStored
from services.engines.trtllm.monitoring.kv_events import FanOut, ReportedBlocks

FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]
HASH_1 = block_hash(root_hash(""), FIRST)
HASH_2 = block_hash(HASH_1, SECOND)
LARGE = 2**63 + 5  # the engine's hashes are unsigned


class Events:
    """Numbered events as the engine serializes them."""

    def __init__(self) -> None:
        self.index = ReportedBlocks(4)
        self._next: dict[int, int] = {}

    def feed(
        self, content: dict[str, Any], rank: int | None = None, window: int = 4096, group: int | None = None
    ) -> list[KvChange]:
        number = self._next.get(rank or 0, 0)
        self._next[rank or 0] = number + 1
        event = {"event_id": number, "window_size": window, "data": content}
        if group is not None:
            event |= {"layer_group_id": group, "hash_algo": "v2_sha256"}
        return self.index.feed(event if rank is None else {**event, "attention_dp_rank": rank})

    def lose_one(self) -> None:
        self._next[0] += 1


@pytest.fixture
def events() -> Events:
    return Events()


def block(number: int | str, tokens: list[Any], **more: object) -> dict[str, Any]:
    listed = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": number, "tokens": listed, "cache_level": 0, "priority": 35, **more}


def stored(*blocks: dict[str, Any], parent: int | str | None = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def removed(*hashes: int | str) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def test_stored_blocks_are_told_by_the_hash_chain_of_their_tokens(events: Events) -> None:
    assert events.feed(stored(block(10, FIRST), block(LARGE, SECOND))) == [KvStored(0, (HASH_1, HASH_2))]


def test_a_chain_goes_on_after_its_parent(events: Events) -> None:
    events.feed(stored(block(LARGE, FIRST)))
    assert events.feed(stored(block(11, SECOND), parent=LARGE)) == [KvStored(0, (HASH_2,))]


def test_a_parent_may_be_named_by_its_signed_number(events: Events) -> None:
    events.feed(stored(block(LARGE, FIRST)))
    assert events.feed(stored(block(11, SECOND), parent=LARGE - 2**64)) == [KvStored(0, (HASH_2,))]


def test_removed_blocks_are_told(events: Events) -> None:
    events.feed(stored(block(10, FIRST)))
    assert events.feed(removed(10)) == [KvRemoved(0, (HASH_1,))]


def test_a_partial_last_block_is_told_neither_when_it_comes_nor_when_it_goes(events: Events) -> None:
    assert events.feed(stored(block(10, FIRST), block(11, [5, 6]))) == [KvStored(0, (HASH_1,))]
    assert events.feed(removed(11)) == []


def test_what_follows_a_block_that_is_not_known_is_not_known(events: Events) -> None:
    assert events.feed(stored(block(11, SECOND), parent=999)) == []


def test_blocks_of_images_are_left_out(events: Events) -> None:
    assert events.feed(stored(block(10, [1, 2, "9af3", 4]), block(11, SECOND))) == []
    assert events.feed(stored(block(12, FIRST, mm_keys=[{"type": "mm_key", "hash": "00", "start_offset": 0}]))) == []


def test_a_cache_salt_starts_another_chain(events: Events) -> None:
    assert events.feed(stored(block(10, FIRST, cache_salt="mine"))) == [
        KvStored(0, (block_hash(root_hash("mine"), FIRST),))
    ]


def test_a_gap_in_the_numbers_forgets_everything(events: Events) -> None:
    events.feed(stored(block(10, FIRST)))
    events.lose_one()
    assert events.feed(stored(block(11, SECOND))) == [
        KvSnapshot(0, ()),
        KvStored(0, (block_hash(root_hash(""), SECOND),)),
    ]
    assert events.index.gaps == 1
    assert events.feed(removed(10)) == []


def test_ranks_are_numbered_and_hold_blocks_apart(events: Events) -> None:
    assert events.feed(stored(block(10, FIRST)), rank=0) == [KvStored(0, (HASH_1,))]
    assert events.feed(stored(block(10, FIRST)), rank=2) == [KvStored(2, (HASH_1,))]
    events.feed(removed(10), rank=2)
    assert events.index.snapshots() == [KvSnapshot(0, (HASH_1,)), KvSnapshot(2, ())]
    assert events.index.gaps == 0


def test_blocks_of_a_sliding_window_are_left_out(events: Events) -> None:
    events.feed({"type": "created", "num_blocks_per_cache_level": [64, 0]}, window=4096)
    assert events.feed(stored(block(10, FIRST)), window=512) == []
    assert events.feed(removed(10), window=512) == []


def test_blocks_are_forgotten_once_a_wider_window_shows(events: Events) -> None:
    events.feed(stored(block(10, FIRST)), window=512)
    assert events.feed(stored(block(10, FIRST)), window=4096) == [KvSnapshot(0, ()), KvStored(0, (HASH_1,))]


def test_what_is_created_or_updated_changes_nothing(events: Events) -> None:
    assert events.feed({"type": "created", "num_blocks_per_cache_level": [64, 0]}) == []
    assert events.feed({"type": "updated", "block_hash": 10, "cache_level": None}) == []


def test_hashes_may_be_text(events: Events) -> None:
    assert events.feed(stored(block("a1", FIRST, cache_salt=None)), group=0) == [KvStored(0, (HASH_1,))]
    assert events.feed(stored(block("b2", SECOND), parent="a1"), group=0) == [KvStored(0, (HASH_2,))]
    assert events.feed(removed("a1"), group=0) == [KvRemoved(0, (HASH_1,))]


def test_a_block_is_told_once_every_group_of_layers_holds_it(events: Events) -> None:
    for group in (0, 1):
        events.feed({"type": "created", "num_blocks_per_cache_level": [64, 0]}, group=group)
    assert events.feed(stored(block("a1", FIRST)), group=0) == []
    assert events.feed(stored(block("a1", FIRST)), group=1) == [KvStored(0, (HASH_1,))]
    assert events.index.snapshots() == [KvSnapshot(0, (HASH_1,))]


def test_a_block_is_gone_as_soon_as_one_group_of_layers_has_lost_it(events: Events) -> None:
    for group in (0, 1):
        events.feed({"type": "created", "num_blocks_per_cache_level": [64, 0]}, group=group)
        events.feed(stored(block("a1", FIRST)), group=group)
    assert events.feed(removed("a1"), group=1) == [KvRemoved(0, (HASH_1,))]
    assert events.feed(removed("a1"), group=0) == []
    assert events.index.snapshots() == [KvSnapshot(0, ())]


def test_a_group_of_layers_that_comes_late_holds_nothing_yet(events: Events) -> None:
    assert events.feed(stored(block("a1", FIRST)), group=0) == [KvStored(0, (HASH_1,))]
    assert events.feed(stored(block("b2", SECOND)), group=1) == [KvSnapshot(0, ())]
    assert events.feed(stored(block("a1", FIRST)), group=1) == [KvStored(0, (HASH_1,))]


def test_groups_of_layers_with_a_sliding_window_do_not_count(events: Events) -> None:
    events.feed({"type": "created", "num_blocks_per_cache_level": [64, 0]}, group=0)
    events.feed({"type": "created", "num_blocks_per_cache_level": [64, 0]}, window=512, group=1)
    assert events.feed(stored(block("a1", FIRST)), group=0) == [KvStored(0, (HASH_1,))]
    assert events.feed(removed("a1"), window=512, group=1) == []


async def test_a_reader_begins_with_a_snapshot(events: Events) -> None:
    fan_out = FanOut(events.index)
    fan_out.tell(events.feed(stored(block(10, FIRST))))
    changes = fan_out.changes()
    assert await anext(changes) == KvSnapshot(0, (HASH_1,))
    fan_out.tell(events.feed(removed(10)))
    assert await anext(changes) == KvRemoved(0, (HASH_1,))


async def test_every_reader_is_told_everything(events: Events) -> None:
    fan_out = FanOut(events.index)
    readers = [fan_out.changes() for _ in range(3)]
    for reader in readers:
        assert await anext(reader) == KvSnapshot(0, ())
    fan_out.tell(events.feed(stored(block(10, FIRST))))
    assert [await anext(reader) for reader in readers] == [KvStored(0, (HASH_1,))] * 3


async def test_a_reader_that_is_too_slow_gets_a_snapshot_instead(events: Events) -> None:
    fan_out = FanOut(events.index)
    reader = fan_out.changes()
    await anext(reader)
    fan_out.tell([KvStored(0, (b"x",))] * 10_001)
    fan_out.tell(events.feed(stored(block(10, FIRST))))
    assert await anext(reader) == KvSnapshot(0, (HASH_1,))


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event_id": "x", "data": {"type": "stored"}},
        {"event_id": 1, "data": None},
        {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": [{}]}, "window_size": 4096},
        {"event_id": 1, "data": {"type": "removed"}, "window_size": 4096},
        {"event_id": 1, "data": {"type": "stored", "parent_hash": [], "blocks": []}, "window_size": 4096},
        {"event_id": 1, "data": {"type": "removed", "block_hashes": 7}, "window_size": "wide"},
        "no event",
        None,
        7,
    ],
    ids=str,
)
def test_after_an_event_that_cannot_be_read_nothing_counts_as_cached(events: Events, event: Any) -> None:
    events.feed(stored(block(10, FIRST)))
    assert events.index.feed(event) == [KvSnapshot(0, ())]
    assert events.index.gaps == 1
    assert events.index.snapshots() == [KvSnapshot(0, ())]
    assert events.feed(stored(block(10, FIRST))) == [KvStored(0, (HASH_1,))]


def test_an_engine_of_more_ranks_than_there_are_fills_no_memory(events: Events) -> None:
    for rank in range(2000):
        events.feed(stored(block(10, FIRST)), rank=rank)
    assert len(events.index.snapshots()) <= 512
