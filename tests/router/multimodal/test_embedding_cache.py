"""The embedding cache: hits, evictions, and shared Encode calls."""

import asyncio
import base64
from typing import Any

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import FAST_ROUTER, Bench, bench
from support.eventually import eventually
from support.images.pictures import picture
from support.images.simulated_workers import EMBEDDING_BYTES, about, different, encoded, leasing, multimodal, sample

from baton.inference.v1 import generate_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from discovery.memory import MemoryRegistry
from router.config import EmbeddingsConfig, RouterConfig
from router.multimodal.cache import ENTRY_BYTES
from router.server import host_router
from rpc.channels import open_channel
from runtime.aio import timeout
from services.server import host_worker

P1, D1 = multimodal("p1", "prefill"), multimodal("d1", "decode")
CACHED, BY_WORKER = generate_pb2.ENCODING_CACHED, generate_pb2.ENCODING_WORKER
SLOW = {"encode_seconds": 2.0}


def keeping(**embeddings: Any) -> RouterConfig:
    return FAST_ROUTER.model_copy(update={"embeddings": EmbeddingsConfig(**embeddings)})


def embedding_blocks(running: Bench, worker_id: str = "e1") -> int:
    return running.workers[worker_id].engines.load().blocks_used


def evictions(reason: str) -> float:
    return sample("baton_embedding_cache_evictions_total", reason=reason)


async def encoding_of(running: Bench, content: bytes) -> "generate_pb2.Encoding.ValueType":
    return (await running.generate(**about(content))).started.encoding


@pytest.mark.parametrize("kind", [multimodal, leasing], ids=["inline", "leased"])
async def test_the_same_image_is_encoded_once(kind: object) -> None:
    assert callable(kind)
    before, hits, misses = encoded(), sample("baton_embedding_cache_hits_total"), misses_so_far()
    async with bench(kind("e1", "encode"), P1, D1) as running:
        first = await running.generate(**about())
        second = await running.generate(**about())
        assert (first.started.encoding, second.started.encoding) == (BY_WORKER, CACHED)
        assert second.finished.usage.cached_embeddings == 1
        assert not second.started.encode_worker_ids
        assert second.text == first.text
        assert sample("baton_embedding_cache_bytes") == EMBEDDING_BYTES
    assert encoded() - before == 1
    assert sample("baton_embedding_cache_hits_total") - hits == 1
    assert misses_so_far() - misses == 1
    assert sample("baton_embedding_cache_bytes") == 0


def misses_so_far() -> float:
    return sample("baton_embedding_cache_misses_total")


async def test_the_content_is_what_counts_and_not_its_address() -> None:
    uri = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    async with bench(multimodal("e1", "encode"), P1, D1) as running:
        await running.generate(**about())
        assert (await running.generate(**about(media=[{"uri": uri}]))).started.encoding == CACHED
        assert await encoding_of(running, picture(width=20)) == BY_WORKER


async def test_requests_with_different_salts_share_no_embedding() -> None:
    async with bench(multimodal("e1", "encode"), P1, D1) as running:
        salts = ["", "a", "b", "a"]
        streams = [await running.generate(**about(routing={"cache_salt": salt})) for salt in salts]
    assert [stream.started.encoding for stream in streams] == [BY_WORKER, BY_WORKER, BY_WORKER, CACHED]


async def test_requests_for_one_image_at_the_same_time_share_a_call() -> None:
    before = encoded()
    async with bench(multimodal("e1", "encode", **SLOW), P1, D1) as running:
        streams = await asyncio.gather(*(running.generate(**about()) for _ in range(8)))
    assert encoded() - before == 1
    assert {stream.started.encoding for stream in streams} == {BY_WORKER}
    assert len({stream.text for stream in streams}) == 1


async def test_one_who_leaves_does_not_take_the_others_encoding_along() -> None:
    before = encoded()
    async with bench(multimodal("e1", "encode", **SLOW), P1, D1) as running:
        leaver = asyncio.create_task(running.generate(**about()))
        await eventually(lambda: running.workers["e1"].engines.load().running == 1)
        stayer = asyncio.create_task(running.generate(**about()))
        await asyncio.sleep(0.1)
        leaver.cancel()
        assert (await stayer).started.encoding == BY_WORKER
    assert encoded() - before == 1


async def test_when_all_who_wait_leave_the_encoding_ends() -> None:
    before = encoded()
    async with bench(leasing("e1", "encode", **SLOW), P1, D1) as running:
        leavers = [asyncio.create_task(running.generate(**about())) for _ in range(3)]
        await eventually(lambda: running.workers["e1"].engines.load().running == 1)
        await asyncio.sleep(0.1)
        for leaver in leavers:
            leaver.cancel()
        await eventually(lambda: running.workers["e1"].engines.load().running == 0)
        assert embedding_blocks(running) == 0
    assert encoded() == before


async def test_the_deadline_of_the_first_is_not_that_of_the_others() -> None:
    async with bench(multimodal("e1", "encode", **SLOW), P1, D1) as running:
        hasty = asyncio.create_task(with_deadline(running, 1.5))
        await eventually(lambda: running.workers["e1"].engines.load().running == 1)
        patient = asyncio.create_task(running.generate(**about()))
        assert await hasty == grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await patient).started.encoding == BY_WORKER


async def with_deadline(running: Bench, seconds: float) -> grpc.StatusCode:
    request = generate_pb2.GenerateRequest(**about())
    with pytest.raises(aio.AioRpcError) as caught:
        _ = [message async for message in running.stub.Generate(request, timeout=seconds)]
    code: grpc.StatusCode = caught.value.code()
    return code


@pytest.mark.parametrize("kind", [multimodal, leasing], ids=["inline", "leased"])
async def test_what_was_used_longest_ago_leaves_first(kind: object) -> None:
    assert callable(kind)
    full = evictions("full")
    a, b, c = different(3)
    room = 2 * (EMBEDDING_BYTES + ENTRY_BYTES)
    async with bench(kind("e1", "encode"), P1, D1, router=keeping(max_bytes=room)) as running:
        for content in (a, b, a, c):
            await running.generate(**about(content))
        assert sample("baton_embedding_cache_bytes") == 2 * EMBEDDING_BYTES
        assert [await encoding_of(running, content) for content in (a, c, b)] == [CACHED, CACHED, BY_WORKER]
        await eventually(lambda: embedding_blocks(running) in (0, 2))
    assert evictions("full") - full == 2


async def test_nothing_is_kept_where_nothing_may_be() -> None:
    async with bench(leasing("e1", "encode"), P1, D1, router=keeping(max_bytes=0)) as running:
        assert [await encoding_of(running, picture()) for _ in range(2)] == [BY_WORKER, BY_WORKER]
        await eventually(lambda: embedding_blocks(running) == 0)


async def test_a_leased_embedding_is_kept_for_many_leases() -> None:
    async with bench(leasing("e1", "encode", lease_seconds=2.0), P1, D1) as running:
        first = await running.generate(**about())
        for _ in range(3):
            await asyncio.sleep(1.5)
            assert embedding_blocks(running) == 1
        second = await running.generate(**about())
        assert second.started.encoding == CACHED
        assert second.text == first.text


async def test_a_leased_embedding_without_waiters_is_given_back() -> None:
    idle = evictions("idle")
    router = keeping(leased_idle_seconds=0.3)
    async with bench(leasing("e1", "encode", lease_seconds=10), P1, D1, router=router) as running:
        await running.generate(**about())
        async with timeout(60):
            await eventually(lambda: embedding_blocks(running) == 0)
    assert evictions("idle") - idle == 1


async def test_an_inline_embedding_without_waiters_stays() -> None:
    async with bench(multimodal("e1", "encode"), P1, D1, router=keeping(leased_idle_seconds=0.1)) as running:
        await running.generate(**about())
        await asyncio.sleep(0.8)
        assert await encoding_of(running, picture()) == CACHED


async def test_a_router_that_ends_gives_everything_back() -> None:
    registry = MemoryRegistry("test")
    async with (
        host_worker(leasing("e1", "encode", lease_seconds=60), registry) as encoder,
        host_worker(multimodal("d1", "prefill", "decode"), registry),
    ):
        async with host_router(FAST_ROUTER, registry) as router, open_channel(router.address) as channel:
            await eventually(lambda: [worker.problem for worker in router.cluster.workers] == ["", ""])
            running = Bench(registry, InferenceServiceStub(channel), None, router.address, router.cluster)  # type: ignore[arg-type]
            await running.generate(**about())
            assert encoder.engines.load().blocks_used == 1
        assert encoder.engines.load().blocks_used == 0


async def test_a_full_pool_is_relieved_of_what_is_merely_cached() -> None:
    relief = evictions("relief")
    async with bench(leasing("e1", "encode", room=2, lease_seconds=2), P1, D1) as running:
        assert [await encoding_of(running, each) for each in different(5)] == [BY_WORKER] * 5
        assert embedding_blocks(running) <= 2
    assert evictions("relief") - relief == 4


async def test_what_lies_on_a_worker_that_leaves_is_encoded_elsewhere() -> None:
    kinds = [leasing(name, "encode") for name in ("e1", "e2")]
    async with bench(*kinds, P1, D1) as running:
        first = await running.generate(**about())
        [owner] = first.started.encode_worker_ids
        await running.stop(owner)
        second = await running.generate(**about())
        assert list(second.started.encode_worker_ids) == [{"e1": "e2", "e2": "e1"}[owner]]
        assert second.text == first.text


async def test_what_is_here_is_served_while_no_worker_encodes() -> None:
    async with bench(multimodal("e1", "encode"), P1, D1) as running:
        first = await running.generate(**about())
        await running.stop("e1")
        await running.ready(2)
        second = await running.generate(**about())
        assert second.started.encoding == CACHED
        assert second.text == first.text
