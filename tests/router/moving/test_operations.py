"""Operators' commands to a worker, and a full pool, move answers elsewhere and end none."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from support.clients.baton_command import Baton
from support.clients.resuming import Received
from support.clients.scraping import since
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.command_fixtures import baton, environment
from support.cluster.in_process import FAST_ROUTER, Stream, bench, growing, running_stream, simulated
from support.cluster.moving import answer, decoders, shared
from support.eventually import PATIENCE_SECONDS, eventually

from baton import AsyncClient
from baton.errors import DeadlineExceeded, Draining, InvalidRequest, RoleMismatch
from baton.inference.v1 import generate_pb2
from router.server import host_router
from services.config import WorkerConfig

__all__ = ["baton", "environment"]

LONG = {"prompt": "hello " * 20, "sampling": {"temperature": 1.0, "seed": 3}, "stopping": {"max_tokens": 800}}
# Answers that a test ends, once it has seen what it waits for: half a minute long.
ENDLESS = {**LONG, "stopping": {"max_tokens": 6000}}
ROOMY = {"num_blocks": 4096}


@pytest.fixture(scope="module")
def undisturbed() -> Stream:
    async def ask() -> Stream:
        async with bench(simulated("d1", "decode")) as running:
            return await running.generate(**ENDLESS)

    return asyncio.run(ask())


async def all_go_on(answers: Sequence[Stream], undisturbed: Stream) -> None:
    """They get more tokens from wherever they are, and all of theirs are the undisturbed ones."""
    before = [len(one.token_ids) for one in answers]
    await eventually(lambda: all(len(one.token_ids) > count for one, count in zip(answers, before, strict=True)))
    assert all(one.token_ids == undisturbed.token_ids[: len(one.token_ids)] for one in answers)


async def test_some_of_a_workers_streams_are_moved(undisturbed: Stream, baton: Baton) -> None:
    moved = since("baton_router_moves_total", outcome="moved")
    async with shared(*decoders("d1", "d2", **ROOMY)) as cluster, AsyncExitStack() as stack:
        answers = [await stack.enter_async_context(growing(cluster.bench, **ENDLESS)) for _ in range(6)]
        at_first, at_second = cluster.running("d1"), cluster.running("d2")
        outcome = await baton("move", "d1", "--streams", "2", "--address", cluster.bench.address)
        assert (outcome.code, outcome.lines) == (0, ["d1 gives 2 answers to other workers"])
        await eventually(lambda: cluster.running("d2") == at_second + 2)
        assert cluster.running("d1") == at_first - 2
        await all_go_on(answers, undisturbed)
    assert moved.grown == 2


async def test_a_worker_is_drained_by_moving(undisturbed: Stream, baton: Baton) -> None:
    async with shared(*decoders("d1", "d2", **ROOMY)) as cluster, AsyncExitStack() as stack:
        answers = [await stack.enter_async_context(growing(cluster.bench, **ENDLESS)) for _ in range(6)]
        outcome = await baton("drain", "d1", "--address", cluster.bench.address)
        assert outcome.code == 0
        assert outcome.lines[0].startswith("d1 is drained after ")
        assert (cluster.running("d1"), cluster.running("d2")) == (0, 6)
        await all_go_on(answers, undisturbed)


async def test_a_full_pool_gives_a_stream_away_before_one_is_computed_again() -> None:
    preempted = since("baton_preemptions_total")
    fields = {"stopping": {"max_tokens": 160, "ignore_eos": True}, "sampling": {"seed": 1}}
    small, large = (_sized(one, blocks) for one, blocks in zip(decoders("d1", "d2"), (28, 512), strict=True))
    async with shared(small) as cluster, AsyncExitStack() as stack:
        streams = [running_stream(cluster.bench, 3, prompt=f"{number} hello", **fields) for number in range(4)]
        tasks = [await stack.enter_async_context(stream) for stream in streams]
        await cluster.start(large)
        answers = [await task for task in tasks]
        assert sum(one.finished.moves for one in answers) >= 1
        assert sum(one.finished.migrations for one in answers) == 0
    assert preempted.grown == 0


def _sized(config: WorkerConfig, blocks: int) -> WorkerConfig:
    engine = config.engine.model_copy(update={"num_blocks": blocks, "decode_step_seconds": 0.02})
    return config.model_copy(update={"engine": engine})


async def test_roles_change_under_load_and_no_request_ends(undisturbed: Stream) -> None:
    configs = [simulated("p1", "prefill"), *decoders("d1", "x")]
    async with shared(*configs) as cluster, AsyncClient(cluster.bench.address) as client:
        done, counts = asyncio.Event(), [0] * 6

        async def load(number: int) -> None:
            while not done.is_set():
                found = await answer(cluster.bench, **{**LONG, "stopping": {"max_tokens": 100}})
                assert found.token_ids == undisturbed.token_ids[:100]
                counts[number] += 1

        running = [asyncio.ensure_future(load(number)) for number in range(6)]
        for role in ("prefill", "decode") * 5:
            await client.change_role("x", role)
            assert cluster.workers["x"].identity.roles == (role,)
            seen = sum(counts)
            await eventually(lambda seen=seen: sum(counts) > seen or any(one.done() for one in running))  # type: ignore[misc]
        done.set()
        await asyncio.gather(*running)


async def test_a_worker_that_has_left_a_role_sends_its_work_elsewhere() -> None:
    async with shared(*decoders("d1", "x"), simulated("p1", "prefill")) as cluster:
        async with AsyncClient(cluster.bench.address) as client:
            await client.change_role("x", "prefill")
        async with calls_to(cluster.workers["x"].address) as late:
            with pytest.raises(Draining, match="x does not decode any more: its roles are prefill"):
                await late.decode(decode_request())


async def test_the_only_worker_of_a_role_keeps_it(baton: Baton) -> None:
    async with shared(*decoders("d1"), simulated("p1", "prefill")) as cluster:
        async with AsyncClient(cluster.bench.address) as client:
            with pytest.raises(RoleMismatch, match="d1 is the only ready one of demo with the role decode"):
                await client.change_role("d1", "prefill")
            with pytest.raises(InvalidRequest, match="no worker 'd9' is registered"):
                await client.drain_worker("d9")
        outcome = await baton("role", "d1", "prefill", "--address", cluster.bench.address)
        assert outcome.code == 1


async def test_a_worker_that_keeps_no_kv_is_not_upgraded_in_place_but_drained_if_asked(
    undisturbed: Stream, baton: Baton
) -> None:
    async with shared(*decoders("d1", "d2", **ROOMY)) as cluster, AsyncExitStack() as stack:
        answers = [await stack.enter_async_context(growing(cluster.bench, **ENDLESS)) for _ in range(4)]
        outcome = await baton("upgrade", "d1", "--address", cluster.bench.address)
        assert (outcome.code, outcome.err[:19]) == (2, "error: UNSUPPORTED:")
        assert cluster.running("d1") + cluster.running("d2") == 4
        outcome = await baton("upgrade", "d1", "--or-drain", "--address", cluster.bench.address)
        assert outcome.code == 0
        assert outcome.lines[0].startswith("worker d1 does not keep its KV (keep_memory.kv)")
        assert outcome.lines[1].startswith("d1 is drained after ")
        assert (cluster.running("d1"), cluster.running("d2")) == (0, 4)
        await all_go_on(answers, undisturbed)


async def test_two_workers_that_two_routers_change_at_once_do_not_both_lose_the_role() -> None:
    async with (
        shared(*decoders("d1", "d2"), simulated("p1", "prefill")) as cluster,
        host_router(FAST_ROUTER, cluster.bench.registry) as other,
        AsyncClient(cluster.bench.address) as first,
        AsyncClient(other.address) as second,
    ):
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == 3)
        changes = (first.change_role("d1", "prefill"), second.change_role("d2", "prefill"))
        outcomes = await asyncio.gather(*changes, return_exceptions=True)
        assert [type(one) for one in outcomes if one is not None] == [RoleMismatch]
        assert {cluster.workers[name].identity.roles for name in ("d1", "d2")} == {("prefill",), ("decode",)}


async def test_an_answer_that_is_kept_is_resumed_at_a_worker_that_has_left_its_role() -> None:
    keep: dict[str, Any] = {"response": {"keep": {"seconds": 30}}}
    fields = {"prompt": "hello", "sampling": {"seed": 3}, "stopping": {"max_tokens": 40, "ignore_eos": True}, **keep}
    async with (
        shared(*decoders("d1"), simulated("p1", "prefill")) as cluster,
        AsyncClient(cluster.bench.address) as client,
    ):
        request = generate_pb2.GenerateRequest(**fields)
        received = Received(request)
        async for message in cluster.bench.stub.Generate(request, timeout=PATIENCE_SECONDS):
            received.add(message)
            if received.tokens >= 3:
                break
        await eventually(lambda: cluster.running("d1") == 0)
        await cluster.start(decoders("d2")[0])
        await cluster.bench.ready(3)
        for role in ("prefill", "decode"):
            await client.change_role("d1", role)
            records = {record.worker_id: record for record in cluster.bench.registry.workers()}
            assert "keeps_streams" in records["d1"].capabilities
            goes_on = Received(request)
            resumed = received.resume(with_copy=False)
            async for message in cluster.bench.stub.ResumeGeneration(resumed, timeout=PATIENCE_SECONDS):
                goes_on.add(message)
            assert goes_on.finished is not None
            assert received.tokens + goes_on.tokens == 40
            assert not goes_on.resumed[0].recomputed
        for worker in cluster.workers.values():
            worker.kept.forget_all()


async def test_a_change_of_roles_that_is_given_up_leaves_the_role(undisturbed: Stream) -> None:
    async with shared(*decoders("d1")) as cluster, running_stream(cluster.bench, 3, **LONG) as task:
        # Another worker decodes, but its blocks have another size: the stream has nowhere to go.
        await cluster.start(simulated("d2", "decode", block_tokens=32))
        await cluster.bench.ready(2)
        async with AsyncClient(cluster.bench.address) as client:
            with pytest.raises(DeadlineExceeded):
                await client.change_role("d1", "prefill", timeout_seconds=0.3)
        await eventually(lambda: cluster.workers["d1"].identity.leaving == ())
        assert cluster.workers["d1"].identity.roles == ("decode",)
        assert (await task).token_ids == undisturbed.token_ids[:800]
