"""The ledger: what a request's stages took, held against clocks that its client can trust."""

import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from baton.inference.v1 import generate_pb2, timing_pb2
from baton.inference.v1.timing_pb2 import StageTiming
from grpc import aio
from support.bench import DECODE, PREFILL, Bench, bench, eventually, simulated
from support.pictures import picture
from support.seeing import about, leasing, seeing

from rpc.metadata import LEDGER_KEY

OVERLAPPING = (timing_pb2.STAGE_DETOKENIZE, timing_pb2.STAGE_UNATTRIBUTED)
REQUEST = {"prompt": "hello " * 40, "stopping": {"max_tokens": 6}}


def nanoseconds(ledger: Sequence[StageTiming], field: str) -> int:
    return sum(getattr(timing, field).ToNanoseconds() for timing in ledger)


def named(ledger: Sequence[StageTiming]) -> list[str]:
    return [timing_pb2.Stage.Name(timing.stage).removeprefix("STAGE_") for timing in ledger]


def seconds_of(ledger: Sequence[StageTiming], name: str) -> float:
    return sum(
        each.duration.ToNanoseconds() / 1e9 for each, known in zip(ledger, named(ledger), strict=True) if known == name
    )


async def timed(running: Bench, **fields: Any) -> tuple[Sequence[StageTiming], float, float]:
    """A request's ledger, and its client's times: until the first token, and until the last message. In seconds."""
    started = time.perf_counter()
    first: float | None = None
    async for message in running.stub.Generate(generate_pb2.GenerateRequest(**fields)):
        if message.token.token_ids and first is None:
            first = time.perf_counter() - started
    assert first is not None
    return message.finished.ledger, first, time.perf_counter() - started


def check(ledger: Sequence[StageTiming], first: float, total: float) -> None:
    """What holds on any machine, however busy: parts of a client's time are no longer than all of it."""
    for timing in ledger:
        assert 0 <= timing.before_first_token.ToNanoseconds() <= timing.duration.ToNanoseconds()
    assert nanoseconds(ledger, "before_first_token") <= first * 1e9
    # Text is made while workers go on; nothing else overlaps.
    apart = [timing for timing in ledger if timing.stage not in OVERLAPPING]
    assert nanoseconds(apart, "duration") <= total * 1e9


async def test_stages_up_to_the_first_token_fit_into_the_clients_time_to_it() -> None:
    async with bench(PREFILL, DECODE) as running:
        for _ in range(20):
            check(*await timed(running, **REQUEST))


async def test_so_they_do_where_the_prompt_runs_on_the_decode_worker() -> None:
    async with bench(DECODE) as running:
        for _ in range(20):
            ledger, first, total = await timed(running, **REQUEST)
            check(ledger, first, total)
            (prompt,) = [each for each in ledger if each.stage == timing_pb2.STAGE_PREFILL_COMPUTE]
            assert prompt.before_first_token.ToNanoseconds() > 0
            (steps,) = [each for each in ledger if each.stage == timing_pb2.STAGE_DECODE]
            assert steps.before_first_token.ToNanoseconds() == 0


@pytest.mark.parametrize("kind", [seeing, leasing], ids=["inline", "leased"])
async def test_so_they_do_with_images(kind: Any) -> None:
    async with bench(kind("e1", "encode"), seeing("p1", "prefill"), seeing("d1", "decode")) as running:
        for width in range(16, 22):
            # Several, which are encoded side by side.
            check(*await timed(running, **about(picture(width=width), picture(width=width + 50))))


async def test_they_are_all_of_the_time_where_an_engine_takes_long() -> None:
    slow = simulated("p1", "prefill", prefill_base_seconds=0.5)
    async with bench(slow, DECODE) as running:
        ledger, first, _ = await timed(running, **REQUEST)
    assert 0.5 <= seconds_of(ledger, "PREFILL_COMPUTE") <= first
    # Whatever is slow besides, most of what the client waited is in the ledger.
    assert nanoseconds(ledger, "before_first_token") > 0.5e9


async def test_a_leased_embedding_says_how_it_came_and_how_many_bytes_it_has() -> None:
    async with bench(leasing("e1", "encode"), seeing("p1", "prefill"), seeing("d1", "decode")) as running:
        ledger, _, _ = await timed(running, **about())
    (moved,) = [timing for timing in ledger if timing.stage == timing_pb2.STAGE_EMBEDDING_TRANSFER]
    assert (moved.worker_id, moved.transport, moved.num_bytes) == ("p1", "shm", 4 * 64 * 4)
    assert moved.duration.ToNanoseconds() == moved.before_first_token.ToNanoseconds() > 0


async def test_an_embedding_out_of_the_cache_was_made_by_nobody() -> None:
    async with bench(seeing("e1", "encode"), seeing("p1", "prefill"), seeing("d1", "decode")) as running:
        await timed(running, **about())
        ledger, _, _ = await timed(running, **about())
    assert [timing.worker_id for timing in ledger if timing.stage == timing_pb2.STAGE_ENCODE] == [""]


async def test_the_trailing_metadata_has_the_ledger_of_the_last_message() -> None:
    async with bench(PREFILL, DECODE) as running:
        call = running.stub.Generate(generate_pb2.GenerateRequest(**REQUEST))
        messages = [message async for message in call]
        assert list((await trailing(call)).stages) == list(messages[-1].finished.ledger)


async def test_an_answer_in_one_message_has_the_ledger_too() -> None:
    async with bench(PREFILL, DECODE) as running:
        request = generate_pb2.GenerateUnaryRequest(request=generate_pb2.GenerateRequest(**REQUEST))
        call = running.stub.GenerateUnary(request)
        answer = await call
        assert list((await trailing(call)).stages) == list(answer.finished.ledger) != []


async def test_a_refused_request_has_the_ledger_as_far_as_it_came() -> None:
    async with bench(PREFILL, DECODE) as running:
        ledger, code = await failed(running, prompt="")
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert named(ledger) == ["ADMISSION", "UNATTRIBUTED"]


async def test_a_request_without_workers_has_the_ledger_up_to_its_routing() -> None:
    async with bench(DECODE) as running:
        ledger, code = await failed(running, prompt="hello", routing={"topology": generate_pb2.TOPOLOGY_DISAGGREGATED})
    assert code == grpc.StatusCode.UNAVAILABLE
    assert named(ledger) == ["ADMISSION", "TOKENIZE", "ROUTE", "UNATTRIBUTED"]


async def test_the_time_of_an_attempt_that_failed_is_in_the_ledger_with_its_worker() -> None:
    slow = simulated("d1", "decode", decode_step_seconds=0.02)
    async with bench(PREFILL, slow) as running:
        call = running.stub.Generate(generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 200}))
        await eventually(lambda: running.workers["d1"].engine.load().running > 0)
        await running.proxies["d1"].cut()
        with pytest.raises(aio.AioRpcError):
            async for _ in call:
                pass
        ledger = (await trailing(call)).stages
    assert {each.worker_id for each in ledger if each.stage == timing_pb2.STAGE_DECODE} == {"d1"}
    assert seconds_of(ledger, "DECODE") > 0


async def test_after_a_lost_prefill_both_attempts_are_in_the_ledger() -> None:
    slow = [simulated(name, "prefill", prefill_base_seconds=0.4) for name in ("p1", "p2")]
    async with bench(*slow, DECODE) as running:
        call = running.stub.Generate(generate_pb2.GenerateRequest(**REQUEST))
        workers = running.workers
        await eventually(lambda: any(workers[name].engine.load().running for name in ("p1", "p2")))
        lost = next(name for name in ("p1", "p2") if workers[name].engine.load().running)
        await running.proxies[lost].cut()
        messages = [message async for message in call]
    ledger = messages[-1].finished.ledger
    assert len({each.worker_id for each in ledger if each.stage == timing_pb2.STAGE_PREFILL_COMPUTE}) == 2
    assert nanoseconds(ledger, "before_first_token") <= nanoseconds(ledger, "duration")


async def trailing(call: Any) -> timing_pb2.Ledger:
    (found,) = [value for key, value in await call.trailing_metadata() if key == LEDGER_KEY]
    return timing_pb2.Ledger.FromString(found)


async def failed(running: Bench, **fields: Any) -> tuple[Sequence[StageTiming], grpc.StatusCode]:
    """The ledger and the status of a request that fails."""
    call = running.stub.Generate(generate_pb2.GenerateRequest(**fields))
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return (await trailing(call)).stages, caught.value.code()
