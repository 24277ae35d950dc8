"""vLLM's KV events in our hash chain; without vLLM."""

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from engine_protocol.prefix_hash import block_hash, block_hashes, root_hash
from services.engines.external.cached_chains import CachedChains
from services.engines.kv_events import KvPublisher, KvSnapshot, KvStored
from services.engines.prompt import MediaSpan
from services.engines.vllm.monitoring.kv_events import read_event
from services.engines.vllm.requests.builder import HANDOFF_SALT

SIZE = 4


class Cache:
    """One rank's chains, and what a reader that comes now is told."""

    def __init__(self) -> None:
        self._publisher = KvPublisher()
        self.chains = CachedChains(0, self._publisher)

    def feed(self, event: dict[str, Any]) -> None:
        if (read := read_event(SIZE, event)) is not None:
            self.chains.feed(read)

    async def on_host(self) -> set[bytes]:
        async with aclosing(self._publisher.changes()) as changes:
            found = [await anext(changes), await anext(changes)]
        return {name for each in found if isinstance(each, KvStored) for name in each.block_hashes}

    async def held(self) -> set[bytes]:
        async with aclosing(self._publisher.changes()) as changes:
            snapshot = await anext(changes)
        assert isinstance(snapshot, KvSnapshot)
        return set(snapshot.block_hashes)


def _stored(hashes: list[int], tokens: list[int], parent: int | None = None, **changed: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return {**event, **changed}


def _chain(salt: str, *blocks: list[int], lora: str = "") -> list[bytes]:
    chain, previous = [], root_hash(salt, lora)
    for tokens in blocks:
        previous = block_hash(previous, tokens)
        chain.append(previous)
    return chain


FIRST, SECOND, THIRD = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


async def test_blocks_are_chained_over_several_events() -> None:
    cache = Cache()
    cache.feed(_stored([71, 72], FIRST + SECOND))
    cache.feed(_stored([73], THIRD, parent=72))
    assert await cache.held() == set(_chain("", FIRST, SECOND, THIRD))


async def test_a_salt_is_the_root_of_its_chain() -> None:
    cache = Cache()
    cache.feed(_stored([71, 72], FIRST + SECOND, extra_keys=[("tenant",), None]))
    assert await cache.held() == set(_chain("tenant", FIRST, SECOND))


@pytest.mark.parametrize("salt", ["", "tenant"])
async def test_an_adapter_is_in_the_root_of_its_chain(salt: str) -> None:
    cache, lora = Cache(), "digest:one"
    first = (lora, salt) if salt else (lora,)
    cache.feed(_stored([71, 72], FIRST + SECOND, lora_name=lora, extra_keys=[first, (lora,)]))
    cache.feed(_stored([73], THIRD, parent=72, lora_name=lora, extra_keys=[(lora,)]))
    assert await cache.held() == set(_chain(salt, FIRST, SECOND, THIRD, lora=lora))


async def test_an_image_is_in_its_blocks_by_digest_and_place() -> None:
    cache, digest = Cache(), bytes(range(32))
    image = MediaSpan(2, 7, digest)
    keys = [("tenant", [f"{digest.hex()}-7", 2]), ([f"{digest.hex()}-7", -2],), ([f"{digest.hex()}-7", -6],)]
    cache.feed(_stored([71, 72], FIRST + SECOND, extra_keys=keys[:2]))
    cache.feed(_stored([73], THIRD, parent=72, extra_keys=keys[2:]))
    names = block_hashes(FIRST + SECOND + THIRD, SIZE, "tenant", [image])
    assert await cache.held() == set(names)
    others = [replace(image, digest=bytes(32)), replace(image, start=1), replace(image, num_tokens=6)]
    for other in others:
        assert not set(names) & set(block_hashes(FIRST + SECOND + THIRD, SIZE, "tenant", [other]))


async def test_two_images_of_a_block_are_both_in_its_name() -> None:
    cache, images = Cache(), [MediaSpan(0, 1, b"one"), MediaSpan(2, 2, b"other")]
    keys = [([f"{b'one'.hex()}-1", 0], [f"{b'other'.hex()}-2", 2])]
    cache.feed(_stored([71], FIRST, extra_keys=keys))
    assert await cache.held() == set(block_hashes(FIRST, SIZE, "", images))


async def test_removed_blocks_are_gone() -> None:
    cache = Cache()
    cache.feed(_stored([71, 72], FIRST + SECOND))
    cache.feed({"type": "BlockRemoved", "block_hashes": [72, 99], "medium": "GPU"})
    assert await cache.held() == set(_chain("", FIRST))


async def test_blocks_that_leave_the_pool_stay_in_host_memory() -> None:
    cache = Cache()
    cache.feed(_stored([71, 72], FIRST + SECOND))
    cache.feed(_stored([71, 72], FIRST + SECOND, medium="CPU"))
    assert await cache.held() == set(_chain("", FIRST, SECOND))
    cache.feed({"type": "BlockRemoved", "block_hashes": [72], "medium": "GPU"})
    assert await cache.held() == set(_chain("", FIRST))
    assert await cache.on_host() == {_chain("", FIRST, SECOND)[1]}
    cache.feed({"type": "BlockRemoved", "block_hashes": [71, 72], "medium": "CPU"})
    assert await cache.held() == set(_chain("", FIRST))
    assert len(cache.chains) == 1


async def test_a_block_of_host_memory_is_the_parent_of_one_in_the_pool() -> None:
    cache = Cache()
    cache.feed(_stored([71], FIRST, medium="CPU"))
    cache.feed(_stored([72], SECOND, parent=71))
    assert await cache.held() == {_chain("", FIRST, SECOND)[1]}
    cache.feed({"type": "AllBlocksCleared"})
    assert len(cache.chains) == 0


async def test_a_cleared_cache_is_empty() -> None:
    cache = Cache()
    cache.feed(_stored([71], FIRST))
    cache.feed({"type": "AllBlocksCleared"})
    assert await cache.held() == set()


@pytest.mark.parametrize(
    "changed",
    [
        {"extra_keys": [("adapter", "tenant")]},
        {"lora_name": "digest:one", "extra_keys": [("digest:one", "tenant", "more")]},
        {"extra_keys": [(["image", 3],)]},
        {"extra_keys": [(["handoff-12-3", 3],)]},
        {"extra_keys": [(["00ff-3", "3"],)]},
        {"extra_keys": [(["00ff-x", 3],)]},
        {"extra_keys": [(f"{HANDOFF_SALT}12",)]},
        {"medium": "STORAGE"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"group_idx": 1},
        {"block_size": 8},
        {"token_ids": [1, 2, 3]},
        {"parent_block_hash": 55},
    ],
    ids=str,
)
async def test_blocks_that_a_prompt_of_text_cannot_use_are_left_out(changed: dict[str, Any]) -> None:
    cache = Cache()
    cache.feed(_stored([71], FIRST, **changed))
    assert await cache.held() == set()


async def test_blocks_behind_an_image_are_left_out() -> None:
    cache = Cache()
    cache.feed(_stored([71, 72, 73], FIRST + SECOND + THIRD, extra_keys=[None, (["image", 1],), None]))
    assert await cache.held() == set(_chain("", FIRST))
