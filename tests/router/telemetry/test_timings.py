"""The timings of a request's stages, compared with its client's clock."""

import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import DECODE, PREFILL, Bench, bench, simulated
from support.eventually import eventually
from support.images.pictures import picture
from support.images.simulated_workers import about, leasing, multimodal

from baton.connection.credentials import TIMINGS_KEY
from baton.inference.v1 import generate_pb2, timing_pb2
from baton.inference.v1.timing_pb2 import StageTiming

OVERLAPPING = (timing_pb2.STAGE_DETOKENIZE, timing_pb2.STAGE_UNATTRIBUTED)
REQUEST = {"prompt": "hello " * 40, "stopping": {"max_tokens": 6}}


def nanoseconds(timings: Sequence[StageTiming], field: str) -> int:
    return sum(getattr(timing, field).ToNanoseconds() for timing in timings)


def named(timings: Sequence[StageTiming]) -> list[str]:
    return [timing_pb2.Stage.Name(timing.stage).removeprefix("STAGE_") for timing in timings]


def seconds_of(timings: Sequence[StageTiming], name: str) -> float:
    return sum(
        each.duration.ToNanoseconds() / 1e9
        for each, known in zip(timings, named(timings), strict=True)
        if known == name
    )


async def timed(running: Bench, **fields: Any) -> tuple[Sequence[StageTiming], float, float]:
    """A request's timings, and its client's times: until the first token, and until the last message. In seconds."""
    started = time.perf_counter()
    first: float | None = None
    async for message in running.stub.Generate(generate_pb2.GenerateRequest(**fields)):
        if message.token.token_ids and first is None:
            first = time.perf_counter() - started
    assert first is not None
    return message.finished.timings, first, time.perf_counter() - started


def check(timings: Sequence[StageTiming], first: float, total: float) -> None:
    """Checks that hold on any machine, however busy: parts of a client's time are no longer than all of it."""
    for timing in timings:
        assert 0 <= timing.before_first_token.ToNanoseconds() <= timing.duration.ToNanoseconds()
    assert nanoseconds(timings, "before_first_token") <= first * 1e9
    # Text is made while workers go on; nothing else overlaps.
    apart = [timing for timing in timings if timing.stage not in OVERLAPPING]
    assert nanoseconds(apart, "duration") <= total * 1e9


async def test_stages_up_to_the_first_token_fit_into_the_clients_time_to_it() -> None:
    async with bench(PREFILL, DECODE) as running:
        for _ in range(20):
            check(*await timed(running, **REQUEST))


async def test_so_they_do_where_the_prompt_runs_on_the_decode_worker() -> None:
    async with bench(DECODE) as running:
        for _ in range(20):
            timings, first, total = await timed(running, **REQUEST)
            check(timings, first, total)
            (prompt,) = [each for each in timings if each.stage == timing_pb2.STAGE_PREFILL_COMPUTE]
            assert prompt.before_first_token.ToNanoseconds() > 0
            (steps,) = [each for each in timings if each.stage == timing_pb2.STAGE_DECODE]
            assert steps.before_first_token.ToNanoseconds() == 0


@pytest.mark.parametrize("kind", [multimodal, leasing], ids=["inline", "leased"])
async def test_so_they_do_with_images(kind: Any) -> None:
    async with bench(kind("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode")) as running:
        for width in range(16, 22):
            # Several, which are encoded side by side.
            check(*await timed(running, **about(picture(width=width), picture(width=width + 50))))


async def test_they_are_all_of_the_time_where_an_engine_takes_long() -> None:
    slow = simulated("p1", "prefill", prefill_base_seconds=0.5)
    async with bench(slow, DECODE) as running:
        timings, first, _ = await timed(running, **REQUEST)
    assert 0.5 <= seconds_of(timings, "PREFILL_COMPUTE") <= first
    # Whatever is slow besides, most of what the client waited is in the timings.
    assert nanoseconds(timings, "before_first_token") > 0.5e9


async def test_a_leased_embedding_says_how_it_came_and_how_many_bytes_it_has() -> None:
    async with bench(leasing("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode")) as running:
        timings, _, _ = await timed(running, **about())
    (moved,) = [timing for timing in timings if timing.stage == timing_pb2.STAGE_EMBEDDING_TRANSFER]
    assert (moved.worker_id, moved.transport, moved.num_bytes) == ("p1", "shm", 4 * 64 * 4)
    assert moved.duration.ToNanoseconds() == moved.before_first_token.ToNanoseconds() > 0


async def test_an_embedding_from_the_cache_has_no_encode_worker() -> None:
    async with bench(multimodal("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode")) as running:
        await timed(running, **about())
        timings, _, _ = await timed(running, **about())
    assert [timing.worker_id for timing in timings if timing.stage == timing_pb2.STAGE_ENCODE] == [""]


async def test_the_trailing_metadata_has_the_timings_of_the_last_message() -> None:
    async with bench(PREFILL, DECODE) as running:
        call = running.stub.Generate(generate_pb2.GenerateRequest(**REQUEST))
        messages = [message async for message in call]
        assert list((await trailing(call)).stages) == list(messages[-1].finished.timings)


async def test_an_answer_in_one_message_has_the_timings_too() -> None:
    async with bench(PREFILL, DECODE) as running:
        request = generate_pb2.GenerateUnaryRequest(request=generate_pb2.GenerateRequest(**REQUEST))
        call = running.stub.GenerateUnary(request)
        answer = await call
        assert list((await trailing(call)).stages) == list(answer.finished.timings) != []


async def test_a_refused_request_has_the_timings_as_far_as_it_came() -> None:
    async with bench(PREFILL, DECODE) as running:
        timings, code = await failed(running, prompt="")
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert named(timings) == ["ADMISSION", "UNATTRIBUTED"]


async def test_a_request_without_workers_has_the_timings_up_to_its_routing() -> None:
    async with bench(DECODE) as running:
        timings, code = await failed(running, prompt="hello", routing={"topology": generate_pb2.TOPOLOGY_DISAGGREGATED})
    assert code == grpc.StatusCode.UNAVAILABLE
    assert named(timings) == ["ADMISSION", "TOKENIZE", "ROUTE", "UNATTRIBUTED"]


async def test_the_time_of_an_attempt_that_failed_is_in_the_timings_with_its_worker() -> None:
    slow = simulated("d1", "decode", decode_step_seconds=0.02)
    async with bench(PREFILL, slow) as running:
        call = running.stub.Generate(generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 200}))
        await eventually(lambda: running.workers["d1"].engine.load().running > 0)
        await running.proxies["d1"].cut()
        with pytest.raises(aio.AioRpcError):
            async for _ in call:
                pass
        timings = (await trailing(call)).stages
    assert {each.worker_id for each in timings if each.stage == timing_pb2.STAGE_DECODE} == {"d1"}
    assert seconds_of(timings, "DECODE") > 0


async def test_after_a_lost_prefill_both_attempts_are_in_the_timings() -> None:
    slow = [simulated(name, "prefill", prefill_base_seconds=0.4) for name in ("p1", "p2")]
    async with bench(*slow, DECODE) as running:
        call = running.stub.Generate(generate_pb2.GenerateRequest(**REQUEST))
        workers = running.workers
        await eventually(lambda: any(workers[name].engine.load().running for name in ("p1", "p2")))
        lost = next(name for name in ("p1", "p2") if workers[name].engine.load().running)
        await running.proxies[lost].cut()
        messages = [message async for message in call]
    timings = messages[-1].finished.timings
    assert len({each.worker_id for each in timings if each.stage == timing_pb2.STAGE_PREFILL_COMPUTE}) == 2
    assert nanoseconds(timings, "before_first_token") <= nanoseconds(timings, "duration")


async def trailing(call: Any) -> timing_pb2.Timings:
    (found,) = [value for key, value in await call.trailing_metadata() if key == TIMINGS_KEY]
    return timing_pb2.Timings.FromString(found)


async def failed(running: Bench, **fields: Any) -> tuple[Sequence[StageTiming], grpc.StatusCode]:
    """The timings and the status of a request that fails."""
    call = running.stub.Generate(generate_pb2.GenerateRequest(**fields))
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return (await trailing(call)).stages, caught.value.code()
