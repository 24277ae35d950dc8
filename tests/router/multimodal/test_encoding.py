"""Encoding images: the choice of workers, their failures, and that embeddings are never mixed up."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import FAST_ROUTER, Stream, bench, running_stream
from support.eventually import eventually
from support.images.pictures import picture
from support.images.simulated_workers import IMAGE_TOKENS, TEXT_TOKENS, about, different, encoded, leasing, multimodal

from baton.inference.v1 import generate_pb2, timing_pb2
from router.config import EmbeddingsConfig, RoutingConfig

P1, D1 = multimodal("p1", "prefill"), multimodal("d1", "decode")
UNCACHED = FAST_ROUTER.model_copy(update={"embeddings": EmbeddingsConfig(max_bytes=0)})
NEVER_INLINE = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy="least_loaded", inline_encode=False)})


@asynccontextmanager
async def underway(request: Coroutine[Any, Any, Stream]) -> AsyncIterator["asyncio.Task[Stream]"]:
    """A request that runs, at most as long as the context is open."""
    task = asyncio.create_task(request)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def expected_text(**request: object) -> str:
    async with bench(multimodal("e1", "encode"), P1, D1) as running:
        return await running.text_of(**request)


async def test_an_image_goes_from_encode_to_prefill_to_decode() -> None:
    async with bench(multimodal("e1", "encode"), P1, D1) as running:
        stream = await running.generate(**about())
    assert stream.started.encoding == generate_pb2.ENCODING_WORKER
    assert list(stream.started.encode_worker_ids) == ["e1"]
    assert stream.started.prompt_tokens == TEXT_TOKENS + IMAGE_TOKENS
    assert stream.finished.usage.prompt_tokens == TEXT_TOKENS + IMAGE_TOKENS
    assert stream.finished.usage.media_tokens == IMAGE_TOKENS
    assert stream.finished.usage.cached_embeddings == 0
    assert stream.placed == ("p1", "d1")
    stages = [timing.stage for timing in stream.finished.timings if timing.worker_id == "e1"]
    assert stages == [timing_pb2.STAGE_ENCODE]


async def test_text_alone_is_encoded_nowhere() -> None:
    async with bench(multimodal("e1", "encode"), P1, D1) as running:
        stream = await running.generate(prompt="x", stopping={"max_tokens": 2})
    assert stream.started.encoding == generate_pb2.ENCODING_NONE
    assert stream.finished.usage.media_tokens == 0


async def test_another_image_is_another_answer_and_no_prefix_is_shared() -> None:
    first, second = different(2)
    async with bench(multimodal("e1", "encode"), P1, D1) as running:
        one = await running.generate(**about(first))
        other = await running.generate(**about(second))
        assert one.text != other.text
        assert other.finished.usage.cached_tokens < TEXT_TOKENS + IMAGE_TOKENS


async def test_the_images_of_a_request_spread_over_encode_workers_and_keep_their_order() -> None:
    pictures = different(4)
    workers = [multimodal(f"e{number}", "encode", encode_seconds=2.0) for number in range(4)]
    async with bench(*workers, P1, D1) as running:
        stream = await running.generate(**about(*pictures))
        [encoding] = [each for each in stream.finished.timings if each.stage == timing_pb2.STAGE_ENCODE]
        # One after another they would take four times as long.
        assert encoding.duration.ToNanoseconds() < 4 * 2.0e9
        assert sorted(stream.started.encode_worker_ids) == ["e0", "e1", "e2", "e3"]
        assert (await running.text_of(**about(*reversed(pictures)))) != stream.text
    assert stream.text == await expected_text(**about(*pictures))


async def test_one_image_twice_in_a_prompt_is_encoded_once() -> None:
    before = encoded()
    async with bench(multimodal("e1", "encode"), P1, D1) as running:
        stream = await running.generate(**about(picture(), picture()))
    assert encoded() - before == 1
    assert stream.finished.usage.media_tokens == 2 * IMAGE_TOKENS


async def test_a_dedicated_encode_worker_is_preferred() -> None:
    async with bench(multimodal("e1", "encode"), multimodal("w1", "encode", "prefill", "decode")) as running:
        streams = [await running.generate(**about(each)) for each in different(3)]
    assert {worker for stream in streams for worker in stream.started.encode_worker_ids} == {"e1"}
    assert {stream.started.encoding for stream in streams} == {generate_pb2.ENCODING_WORKER}


async def test_without_one_a_worker_that_can_encodes_inline_and_says_so() -> None:
    async with bench(multimodal("w1", "encode", "prefill", "decode")) as running:
        stream = await running.generate(**about())
    assert stream.started.encoding == generate_pb2.ENCODING_INLINE
    assert list(stream.started.encode_worker_ids) == ["w1"]
    assert stream.text == await expected_text(**about())


async def test_inline_encoding_can_be_forbidden() -> None:
    async with bench(multimodal("w1", "encode", "prefill", "decode"), router=NEVER_INLINE) as running:
        with pytest.raises(aio.AioRpcError, match="no encode worker of demo is ready: ") as caught:
            await running.generate(**about())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "w1: has the encode role beside prefill and decode only" in str(caught.value.details())
        assert await running.text_of(prompt="x", stopping={"max_tokens": 2})


async def test_without_any_encode_worker_the_reasons_are_told() -> None:
    async with bench(P1, D1) as running:
        with pytest.raises(aio.AioRpcError, match="no encode worker of demo is ready: ") as caught:
            await running.generate(**about())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "p1: has no encode role" in str(caught.value.details())


@pytest.mark.parametrize("kind", [multimodal, leasing], ids=["inline", "leased"])
async def test_an_encode_worker_lost_in_the_middle_is_replaced_by_another(kind: object) -> None:
    assert callable(kind)
    workers = [kind(name, "encode", encode_seconds=0.4) for name in ("e1", "e2")]
    async with bench(*workers, P1, D1, router=UNCACHED) as running:
        async with underway(running.generate(**about())) as task:
            await eventually(lambda: any(worker.engines.load().running for worker in running.workers.values()))
            lost = next(name for name, worker in running.workers.items() if worker.engines.load().running)
            await running.proxies[lost].cut()
            stream = await task
        assert list(stream.started.encode_worker_ids) == [{"e1": "e2", "e2": "e1"}[lost]]
        assert stream.text == await expected_text(**about())
        await eventually(lambda: all(worker.engines.load().blocks_used == 0 for worker in running.workers.values()))


async def test_without_another_encode_worker_the_failure_says_where_it_was() -> None:
    async with bench(multimodal("e1", "encode", encode_seconds=1.0), P1, D1) as running:
        async with underway(running.generate(**about())) as task:
            await eventually(lambda: running.workers["e1"].engines.load().running > 0)
            await running.proxies["e1"].cut()
            with pytest.raises(aio.AioRpcError) as caught:
                await task
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("kind", [multimodal, leasing], ids=["inline", "leased"])
async def test_a_lost_decode_goes_on_elsewhere_with_the_image(kind: object) -> None:
    assert callable(kind)
    slow = [multimodal(name, "decode", decode_step_seconds=0.01) for name in ("d1", "d2")]
    async with bench(kind("e1", "encode"), P1, *slow) as running:
        async with running_stream(running, 10, **about(max_tokens=60)) as task:
            lost = next(name for name in ("d1", "d2") if running.workers[name].engine.load().running)
            await running.proxies[lost].cut()
            stream = await task
        assert stream.finished.migrations == 1
        assert stream.finished.decode_worker_id == {"d1": "d2", "d2": "d1"}[lost]
    assert stream.text == await expected_text(**about(max_tokens=60))


async def test_an_embedding_that_is_lost_is_encoded_again() -> None:
    before = encoded()
    async with bench(leasing("e1", "encode"), leasing("e2", "encode"), P1, D1) as running:
        first = await running.generate(**about())
        [owner] = first.started.encode_worker_ids
        await running.workers[owner].leases.release_all()
        second = await running.generate(**about())
        assert second.started.encoding == generate_pb2.ENCODING_CACHED
        assert second.text == first.text
    assert encoded() - before == 2


async def test_embeddings_of_another_model_version_are_never_mixed() -> None:
    # An upgrade under way: there is a new encode worker already, and no new decode worker yet.
    new = {"image_hidden_size": 128}
    async with bench(multimodal("e1", "encode"), multimodal("e2", "encode", **new), P1, D1) as running:
        streams = [await running.generate(**about(each)) for each in different(4)]
        assert {worker for stream in streams for worker in stream.started.encode_worker_ids} == {"e1"}
        await running.stop("e1")
        await running.ready(3)
        with pytest.raises(aio.AioRpcError, match="no encode worker of demo is ready") as caught:
            await running.generate(**about(picture(width=99)))
        assert "e2: its embedding layout" in str(caught.value.details())
