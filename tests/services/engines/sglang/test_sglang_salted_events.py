"""Events of SGLang's own radix cache and publisher, with the adapter's salts, in the adapter's reader."""

import asyncio
import importlib
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.engines import sglang
from support.eventually import eventually

from engine_protocol.prefix_hash import block_hashes
from services.engines.external.event_reader import EventEndpoints, EventReader, event_sockets
from services.engines.sglang.inside.kv_events import tell_salts
from services.engines.sglang.kv_events import sglang_format

pytestmark = [pytest.mark.requires_sglang, pytest.mark.timeout(300)]

SIZE = 4
CHAIN = list(range(12))
FORKED = [*range(8), 9, 9, 9, 9]


class Pool:
    """Memory without blocks."""

    device = "cpu"

    def free(self, indices: object) -> None:
        pass


class Cache:
    """SGLang's RadixCache, whose events its ZmqEventPublisher sends."""

    def __init__(self, endpoints: EventEndpoints, *, salted: bool = True) -> None:
        self._events, radix, self._params = (
            importlib.import_module(f"sglang.srt.{name}")
            for name in ("disaggregation.kv_events", "mem_cache.radix_cache", "mem_cache.base_prefix_cache")
        )
        self._key = radix.RadixKey
        own: Any = type("Salted", (radix.RadixCache,), {})
        if salted:
            tell_salts(own, self._events.BlockStored, radix.get_hash_str)
        made = importlib.import_module("sglang.srt.mem_cache.cache_init_params").CacheInitParams
        self._cache = own(
            made(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=Pool(),
                page_size=SIZE,
                enable_kv_cache_events=True,
            )
        )
        self._publisher = self._events.ZmqEventPublisher(0, endpoints.events, endpoints.replay)

    def insert(self, tokens: list[int], salt: str | None = None) -> None:
        self._cache.insert(self._params.InsertParams(key=self._key(array("q", tokens), salt)))
        self.publish()

    def evict(self, tokens: int) -> None:
        self._cache.evict(self._params.EvictParams(num_tokens=tokens))
        self.publish()

    def reset(self) -> None:
        self._cache.reset()
        self.publish()

    def publish(self, events: list[Any] | None = None) -> None:
        taken = self._cache.take_events() if events is None else events
        self._publisher.publish(self._events.KVEventBatch(ts=1.5, events=taken))

    def close(self) -> None:
        self._publisher.shutdown()


@pytest_asyncio.fixture
async def endpoints() -> AsyncIterator[EventEndpoints]:
    with sglang.installed(), event_sockets(1) as found:
        yield found


def held(reader: EventReader) -> set[bytes]:
    return set(reader._publisher._held[0])


def chain(tokens: list[int], salt: str = "") -> set[bytes]:
    return set(block_hashes(tokens, SIZE, salt))


async def test_chains_of_equal_tokens_are_held_and_evicted_apart(endpoints: EventEndpoints) -> None:
    cache = await asyncio.to_thread(Cache, endpoints)
    # The first ones are published before the reader is there.
    cache.insert(CHAIN, "tenant")
    cache.insert(CHAIN)
    async with EventReader(endpoints, 1, sglang_format(SIZE)) as reader:
        await eventually(lambda: held(reader) == chain(CHAIN) | chain(CHAIN, "tenant"))
        cache.insert(FORKED)
        cache.insert(FORKED, "tenant")
        both = chain(CHAIN) | chain(FORKED)
        await eventually(lambda: held(reader) == both | chain(CHAIN, "tenant") | chain(FORKED, "tenant"))
        # The least recently used page is the last one of the first chain without a salt.
        cache.evict(SIZE)
        await eventually(lambda: held(reader) == chain(FORKED) | chain(CHAIN, "tenant") | chain(FORKED, "tenant"))
        cache.reset()
        await eventually(lambda: held(reader) == set())
        cache.insert(CHAIN, "other")
        await eventually(lambda: held(reader) == chain(CHAIN, "other"))
    cache.close()


async def test_sglangs_own_events_which_tell_no_salt_are_left_out(endpoints: EventEndpoints) -> None:
    cache = await asyncio.to_thread(lambda: Cache(endpoints, salted=False))
    async with EventReader(endpoints, 1, sglang_format(SIZE)) as reader:
        cache.insert(CHAIN, "tenant")
        cache.insert(FORKED)
        cache.publish([["BlockStored", [1], None, CHAIN[:SIZE], SIZE, None, "GPU", "told"]])
        await eventually(lambda: held(reader) == chain(CHAIN[:SIZE], "told"))
    cache.close()
