"""Decodes that are moved to another worker while they run: same ids, and nothing is computed again."""

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack, aclosing

import pytest
from support.clients.resuming import Received
from support.clients.scraping import since
from support.cluster.in_process import FAST_ROUTER, Stream, bench, running_stream, simulated
from support.cluster.moving import answer, decoders, shared
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import stream
from baton.inference.v1 import generate_pb2

LONG = {"prompt": "hello " * 20, "sampling": {"temperature": 1.0, "seed": 3}, "stopping": {"max_tokens": 400}}
WITH_FAULTS = FAST_ROUTER.model_copy(update={"allow_faults": True})


@pytest.fixture(scope="module")
def undisturbed() -> Stream:
    async def ask() -> Stream:
        async with bench(simulated("d1", "decode")) as running:
            return await running.generate(**LONG)

    return asyncio.run(ask())


@pytest.mark.feature("running answers that move to another worker", engine="simulated", facade="grpc")
async def test_a_stream_is_moved_with_its_kv(undisturbed: Stream) -> None:
    moved = since("baton_router_moves_total", outcome="moved")
    async with shared(*decoders("d1", "d2")) as cluster:
        async with running_stream(cluster.bench, 20, **LONG) as task:
            source = cluster.busy
            assert await cluster.move(source) == 1
            await cluster.moved(source)
            answer = await task
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text
        assert (answer.finished.moves, answer.finished.migrations) == (1, 0)
        assert answer.finished.usage.cached_tokens == 0
        assert answer.finished.decode_worker_id == cluster.other(source)
    assert moved.grown == 1


async def test_a_stream_may_be_moved_again_and_again(undisturbed: Stream) -> None:
    async with shared(*decoders("d1", "d2")) as cluster:
        async with running_stream(cluster.bench, 5, **LONG) as task:
            for _ in range(5):
                source = cluster.busy
                await cluster.move(source)
                await cluster.moved(source)
            answer = await task
        assert answer.token_ids == undisturbed.token_ids
        assert answer.finished.moves == 5


async def test_a_worker_that_stops_gives_its_streams_away(undisturbed: Stream) -> None:
    computed = since("baton_router_moves_total", outcome="recomputed")
    async with shared(*decoders("d1", "d2")) as cluster:
        async with AsyncExitStack() as stack:
            tasks = [await stack.enter_async_context(running_stream(cluster.bench, 3, **LONG)) for _ in range(6)]
            given = cluster.running("d1")
            assert given
            await cluster.stop("d1")
            answers = [await task for task in tasks]
        assert all(answer.token_ids == undisturbed.token_ids for answer in answers)
        assert all(answer.finished.decode_worker_id == "d2" for answer in answers)
        assert sum(answer.finished.moves for answer in answers) == given
        assert sum(answer.finished.migrations for answer in answers) == 0
    assert computed.grown == 0


@pytest.mark.parametrize("with_copy", [False, True])
async def test_a_kept_answer_that_has_moved_is_resumed_where_it_went(undisturbed: Stream, *, with_copy: bool) -> None:
    request = generate_pb2.GenerateRequest(**LONG, response={"keep": {"seconds": 5}})
    received = Received(request)
    async with shared(*decoders("d1", "d2"), router=FAST_ROUTER) as cluster:
        source = ""
        async with aclosing(stream(cluster.bench.stub.Generate(request, timeout=PATIENCE_SECONDS))) as messages:
            async for message in messages:
                received.add(message)
                if not source and received.tokens >= 20:
                    source = cluster.busy
                    await cluster.move(source)
                if source and not cluster.running(source) and cluster.running(cluster.other(source)):
                    break
        [other] = [one for one in cluster.bench.cluster.workers if one.record.worker_id != source]
        other.health.suspend("it was late once")
        resumed = cluster.bench.stub.ResumeGeneration(received.resume(with_copy=with_copy), timeout=PATIENCE_SECONDS)
        async with aclosing(stream(resumed)) as messages:
            async for message in messages:
                received.add(message)
                assert not cluster.running(source)
    assert list(received.ids[0]) == list(undisturbed.token_ids)
    assert not any(one.recomputed for one in received.resumed)


async def test_without_another_worker_a_stream_stays(undisturbed: Stream) -> None:
    async with shared(*decoders("d1")) as cluster:
        async with running_stream(cluster.bench, 5, **LONG) as task:
            assert await cluster.move("d1") == 1
            answer = await task
        assert answer.token_ids == undisturbed.token_ids
        assert answer.finished.moves == 0


async def test_what_a_worker_has_lent_to_one_that_refuses_it_is_free_at_once(undisturbed: Stream) -> None:
    failed = since("baton_router_moves_total", outcome="failed")
    async with shared(*decoders("d1", "d2", allow_faults=True), router=WITH_FAULTS) as cluster:
        task = asyncio.ensure_future(answer(cluster.bench, "drop@warm;attempt=2", **LONG))
        await eventually(lambda: cluster.running("d1") + cluster.running("d2") > 0)
        source = cluster.busy
        await cluster.move(source)
        await eventually(lambda: failed.grown > 0)
        # Sooner than a lease ends, which is 5 s.
        await eventually(lambda: not len(cluster.workers[source].leases), 4.0)
        assert (await task).token_ids == undisturbed.token_ids


async def test_kv_of_a_stream_that_yields_as_its_client_leaves_is_free_at_once() -> None:
    async with shared(*decoders("d1", "d2")) as cluster:
        async with running_stream(cluster.bench, 20, **LONG) as task:
            source = cluster.busy
            [ctx] = cluster.bench.requests._running.values()
            leases = cluster.workers[source].leases
            await cluster.move(source)
            # Until it has yielded, and before its router, on the same loop, has read that.
            while cluster.running(source) or not leases.of(ctx.call_id):  # noqa: ASYNC110
                await asyncio.sleep(0)
            running = ctx.cancellation._task
            assert running is not None
            running.cancel()
            task.cancel()
        # Sooner than a lease ends, which is 5 s.
        await eventually(lambda: not len(leases), 4.0)
        # Nor has it gone on elsewhere.
        assert not cluster.running(cluster.other(source))


async def test_a_router_keeps_nothing_of_a_worker_that_has_given_its_streams_away() -> None:
    async with shared(*decoders("d1", "d2")) as cluster:
        async with running_stream(cluster.bench, 5, **LONG) as task:
            source = cluster.busy
            [handle] = [weakref.ref(one) for one in cluster.bench.cluster.workers if one.record.worker_id == source]
            await cluster.stop(source)
            await task
        await cluster.start(decoders(source)[0])
        await cluster.bench.ready(2)
        await cluster.bench.generate(**{**LONG, "stopping": {"max_tokens": 1}})  # the placer remembers its last choice

        def is_gone() -> bool:
            gc.collect()
            return handle() is None

        await eventually(is_gone)


@pytest.mark.parametrize(
    ("plan", "outcome"),
    [
        ("drop@lend", "failed"),
        ("drop@warm;attempt=2", "failed"),
        ("drop@yield", "failed"),
        ("drop@queue;role=decode;attempt=2", "returned"),
        ("drop@reserve;attempt=2", "returned"),
        ("drop@pull;attempt=2", "returned"),
        ("drop@confirm;attempt=2", "recomputed"),
        ("delay=0.02@warm;attempt=2,delay=0.02@lend,delay=0.02@yield", "moved"),
        ("delay=0.2@pull;attempt=2", "moved"),
        ("drop@decode:200;attempt=2", "moved"),
    ],
)
async def test_a_failure_at_any_step_costs_no_token(undisturbed: Stream, plan: str, outcome: str) -> None:
    counted = since("baton_router_moves_total", outcome=outcome)
    async with shared(*decoders("d1", "d2", allow_faults=True), router=WITH_FAULTS) as cluster:
        task = asyncio.ensure_future(answer(cluster.bench, plan, **LONG))
        await eventually(lambda: cluster.running("d1") + cluster.running("d2") > 0)
        await cluster.move(cluster.busy)
        stream = await task
        assert stream.token_ids == undisturbed.token_ids
        assert stream.text == undisturbed.text
    assert counted.grown >= 1
