"""A router's metrics after real requests to simulated workers."""

import asyncio
from collections.abc import Iterable

import pytest
from grpc import aio
from structlog.testing import capture_logs
from support.clients.scraping import sample, since
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, Stream, bench, simulated
from support.eventually import eventually
from support.images.simulated_workers import IMAGE_TOKENS, about, multimodal
from support.log_fields import merge_log_fields

from baton.inference.v1 import generate_pb2, timing_pb2
from router.config import AdmissionConfig, RouterConfig

SHORT = {"model": "demo", "request_class": "short"}
REQUESTS = "baton_router_requests_total"
STAGES = [name.removeprefix("STAGE_").lower() for name, number in timing_pb2.Stage.items() if number]
STEP = 0.02
SLOW_DECODE = simulated("d1", "decode", decode_step_seconds=STEP)


def seconds_of(timings: Iterable[timing_pb2.StageTiming]) -> dict[str, float]:
    """Of each stage, those that are not there included."""
    seconds = dict.fromkeys(STAGES, 0.0)
    for timing in timings:
        seconds[timing_pb2.Stage.Name(timing.stage).removeprefix("STAGE_").lower()] += (
            timing.duration.ToNanoseconds() / 1e9
        )
    return seconds


def one_at_a_time(max_waiting: int = 10) -> RouterConfig:
    admission = AdmissionConfig(max_running_per_worker=1, max_waiting=max_waiting)
    return FAST_ROUTER.model_copy(update={"admission": admission})


async def run(running: Bench, max_tokens: int = 5, prompt: str = "hello", **fields: object) -> Stream:
    return await running.generate(prompt=prompt, stopping={"max_tokens": max_tokens}, **fields)


async def refuse(running: Bench, prompt: str = "") -> None:
    with pytest.raises(aio.AioRpcError):
        await run(running, prompt=prompt)


async def lose_decode(running: Bench) -> Stream:
    """A request whose decode worker is cut off after some tokens."""
    request = generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 40})
    stream = Stream([])
    async for message in running.stub.Generate(request, timeout=60):
        stream.messages.append(message)
        if len(stream.token_ids) == 5:
            lost = next(name for name in ("d1", "d2") if running.workers[name].engine.load().running)
            await running.proxies[lost].cut()
    return stream


# How requests end.


async def test_a_request_that_ended_well_is_counted_by_its_finish_reason(pair: Bench) -> None:
    ended = since(REQUESTS, **SHORT, outcome="ok", reason="LENGTH")
    await run(pair)
    assert ended.grown == 1


async def test_a_refused_request_is_counted_by_its_reason(pair: Bench) -> None:
    ended = since(REQUESTS, model="demo", request_class="unknown", outcome="refused", reason="INVALID_REQUEST")
    await refuse(pair)
    assert ended.grown == 1


async def test_a_request_that_no_worker_can_run_has_failed() -> None:
    async with bench(PREFILL, DECODE) as running:
        ended = since(REQUESTS, **SHORT, outcome="failed", reason="NO_WORKER")
        await running.proxies["d1"].cut()
        await eventually(lambda: any(worker.problem for worker in running.cluster.workers))
        await refuse(running, "hello")
    assert ended.grown == 1


async def test_a_request_whose_client_leaves_is_cancelled() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:
        ended = since(REQUESTS, **SHORT, outcome="cancelled", reason="CANCELLED")
        call = running.stub.Generate(generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 500}))
        await call.read()
        assert sample("baton_router_running_requests") == 1
        call.cancel()
        await eventually(lambda: sample("baton_router_running_requests") == 0 == running.used_blocks())
    assert ended.grown == 1


async def test_a_deadline_that_passes_is_a_failure_and_no_cancel() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:
        ended = since(REQUESTS, **SHORT, outcome="failed", reason="DEADLINE_EXCEEDED")
        request = generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 500})
        with pytest.raises(aio.AioRpcError):
            async for _ in running.stub.Generate(request, timeout=1.5):
                pass
        await eventually(lambda: ended.grown == 1)


@pytest.mark.parametrize(("tokens", "name"), [(1023, "short"), (1024, "medium"), (8191, "medium"), (8192, "long")])
async def test_a_requests_class_is_by_the_length_of_its_prompt(tokens: int, name: str) -> None:
    async with bench(*(simulated(role, role, block_tokens=32) for role in ("prefill", "decode"))) as running:
        ended = since(REQUESTS, model="demo", request_class=name, outcome="ok", reason="LENGTH")
        await run(running, max_tokens=1, prompt="x" * tokens)
    assert ended.grown == 1


async def test_a_request_with_images_is_a_class_of_its_own() -> None:
    workers = (multimodal("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode"))
    async with bench(*workers) as running:
        ended = since(REQUESTS, model="demo", request_class="image", outcome="ok", reason="LENGTH")
        media = since("baton_router_tokens_total", model="demo", request_class="image", kind="media")
        await running.generate(**about())
    assert (ended.grown, media.grown) == (1, IMAGE_TOKENS)


# How long they took.


async def test_the_first_tokens_time_is_the_one_of_the_log(pair: Bench) -> None:
    seconds = since("baton_router_time_to_first_token_seconds_sum", **SHORT)
    count = since("baton_router_time_to_first_token_seconds_count", **SHORT)
    with capture_logs(processors=[merge_log_fields]) as lines:
        await run(pair)
    (line,) = [line for line in lines if "ttft_seconds" in line]
    assert count.grown == 1
    assert seconds.grown == pytest.approx(line["ttft_seconds"], abs=2e-6)


async def test_the_first_tokens_time_is_told_while_the_answer_goes_on() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:
        count = since("baton_router_time_to_first_token_seconds_count", **SHORT)
        call = running.stub.Generate(generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 100}))
        await eventually(lambda: count.grown == 1)
        assert sample("baton_router_running_requests") == 1
        async for _ in call:
            pass
    assert count.grown == 1


async def test_every_token_after_the_first_has_its_latency() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:
        count = since("baton_router_inter_token_latency_seconds_count", **SHORT)
        seconds = since("baton_router_inter_token_latency_seconds_sum", **SHORT)
        whole = since("baton_router_request_seconds_sum", **SHORT)
        await run(running, max_tokens=11)
    assert count.grown == 10
    assert 9 * STEP < seconds.grown < whole.grown


# On ours they do not come together.
async def test_tokens_that_come_together_all_have_their_latency(on_grpcio: Bench) -> None:
    count = since("baton_router_inter_token_latency_seconds_count", **SHORT)
    seconds = since("baton_router_inter_token_latency_seconds_sum", **SHORT)
    whole = since("baton_router_request_seconds_sum", **SHORT)
    streams = await asyncio.gather(*(run(on_grpcio, max_tokens=300) for _ in range(16)))
    assert max(len(stream.messages) for stream in streams) < 200
    assert count.grown == 16 * 299
    assert seconds.grown < whole.grown


async def test_a_requests_whole_time_is_the_one_of_the_log(pair: Bench) -> None:
    seconds = since("baton_router_request_seconds_sum", **SHORT)
    with capture_logs(processors=[merge_log_fields]) as lines:
        await run(pair)
    (line,) = [line for line in lines if "total_seconds" in line]
    assert seconds.grown == pytest.approx(line["total_seconds"], abs=2e-6)


async def test_a_request_that_did_not_end_well_has_no_time() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:
        whole = since("baton_router_request_seconds_count", **SHORT)
        stages = since("baton_router_stage_seconds_count", **SHORT, stage="prefill_compute")
        prompt = since("baton_router_tokens_total", **SHORT, kind="prompt")
        request = generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 500})
        with pytest.raises(aio.AioRpcError):
            async for _ in running.stub.Generate(request, timeout=1.5):
                pass
        await eventually(lambda: prompt.grown == 5)
    assert (whole.grown, stages.grown) == (0, 0)


async def test_stages_are_those_of_the_timings_that_the_client_got(pair: Bench) -> None:
    sums = {stage: since("baton_router_stage_seconds_sum", **SHORT, stage=stage) for stage in STAGES}
    timings = (await run(pair)).finished.timings
    assert len(timings) > 8
    assert {stage: each.grown for stage, each in sums.items()} == pytest.approx(seconds_of(timings), abs=1e-8)


async def test_a_stage_that_was_gone_through_twice_counts_once(pair: Bench) -> None:
    count = since("baton_router_stage_seconds_count", **SHORT, stage="admission")
    await run(pair)
    assert count.grown == 1


# Waiting.


async def test_a_request_that_is_let_in_at_once_has_waited_no_time(pair: Bench) -> None:
    count, seconds = since("baton_router_queue_seconds_count"), since("baton_router_queue_seconds_sum")
    await run(pair)
    assert (count.grown, seconds.grown) == (1, 0)


async def test_requests_that_wait_are_counted_and_timed() -> None:
    async with bench(PREFILL, SLOW_DECODE, router=one_at_a_time()) as running:
        seconds = since("baton_router_queue_seconds_sum")
        first, second = (asyncio.create_task(run(running, max_tokens=21)) for _ in range(2))
        await eventually(lambda: sample("baton_router_waiting_requests") == 1)
        assert sample("baton_router_running_requests") == 2
        await asyncio.gather(first, second)
    assert sample("baton_router_waiting_requests") == 0
    assert 10 * STEP < seconds.grown < 5


async def test_a_request_that_is_not_let_in_is_a_refusal() -> None:
    async with bench(PREFILL, SLOW_DECODE, router=one_at_a_time(max_waiting=0)) as running:
        refused = since("baton_router_refusals_total", reason="OVERLOADED")
        inside = running.stub.Generate(generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 500}))
        await inside.read()
        await refuse(running, "hello")
        inside.cancel()
        await eventually(lambda: running.used_blocks() == 0)
    assert refused.grown == 1


# Tokens.


async def test_tokens_are_those_of_the_usage(pair: Bench) -> None:
    prompt = "a prompt of more than sixteen tokens, twice"
    await run(pair, prompt=prompt)
    counted = ("prompt", "cached", "completion")
    kinds = {kind: since("baton_router_tokens_total", **SHORT, kind=kind) for kind in counted}
    usage = (await run(pair, prompt=prompt, max_tokens=7)).finished.usage
    assert usage.cached_tokens > 0
    assert {kind: each.grown for kind, each in kinds.items()} == {
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "completion": 7,
    }


# Workers.


async def test_workers_are_counted_by_role_and_state() -> None:
    def workers(role: str, state: str) -> float:
        return sample("baton_router_workers", worker_role=role, state=state)

    async with bench(PREFILL, simulated("d1", "decode"), simulated("d2", "prefill", "decode")) as running:
        assert [workers(role, "ready") for role in ("encode", "prefill", "decode")] == [0, 2, 2]
        await running.proxies["d1"].cut()
        await eventually(lambda: workers("decode", "unhealthy") == 1)
        assert workers("decode", "ready") == 1


async def test_a_prompt_that_is_run_again_elsewhere_is_a_retry_and_a_migration() -> None:
    slow = [simulated(name, "prefill", prefill_base_seconds=0.3) for name in ("p1", "p2")]
    async with bench(*slow, DECODE) as running:
        retries = since("baton_router_retries_total", stage="prefill")
        migrations = since("baton_router_migrations_total", stage="prefill")
        answer = asyncio.create_task(run(running))
        await eventually(lambda: any(worker.engines.load().running for worker in running.workers.values()))
        lost = next(name for name, worker in running.workers.items() if worker.engines.load().running)
        await running.proxies[lost].cut()
        assert (await answer).finished.migrations == 1
    assert (retries.grown, migrations.grown) == (1, 1)


async def test_a_decode_that_goes_on_elsewhere_is_a_retry_and_a_migration() -> None:
    slow = [simulated(name, "decode", decode_step_seconds=STEP) for name in ("d1", "d2")]
    async with bench(PREFILL, *slow) as running:
        retries = since("baton_router_retries_total", stage="decode")
        migrations = since("baton_router_migrations_total", stage="decode")
        decodes = since("baton_router_stage_seconds_sum", **SHORT, stage="decode")
        stream = await lose_decode(running)
    assert stream.finished.migrations == 1
    assert (retries.grown, migrations.grown) == (1, 1)
    assert len([timing for timing in stream.finished.timings if timing.stage == timing_pb2.STAGE_DECODE]) == 2
    assert decodes.grown == pytest.approx(seconds_of(stream.finished.timings)["decode"], abs=1e-8)
