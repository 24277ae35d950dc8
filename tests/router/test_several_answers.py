"""Several answers to one prompt, over a prefill and a decode worker."""

import asyncio

import pytest
from grpc import StatusCode, aio
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, Stream, bench, running_stream, simulated
from support.eventually import eventually

from baton.inference.v1 import generate_pb2, sampling_pb2
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig

SEEDED = {"temperature": 1.0, "seed": 7}


def text_of(stream: Stream, index: int) -> str:
    return "".join(message.token.text for message in stream.messages if message.token.index == index)


def ends_of(stream: Stream) -> dict[int, generate_pb2.AnswerFinished]:
    return {
        one.answer_finished.index: one.answer_finished for one in stream.messages if one.HasField("answer_finished")
    }


@pytest.mark.feature("several answers", engine="simulated", facade="grpc")
async def test_each_answer_is_that_of_its_own_seed(pair: Bench) -> None:
    stopping = {"max_tokens": 20}
    stream = await pair.generate(prompt="hello", sampling={**SEEDED, "n": 3}, stopping=stopping)
    for index in range(3):
        alone = await pair.text_of(prompt="hello", sampling={"temperature": 1.0, "seed": 7 + index}, stopping=stopping)
        assert text_of(stream, index) == alone


async def test_answers_without_a_seed_differ(pair: Bench) -> None:
    stream = await pair.generate(prompt="hello", sampling={"temperature": 1.0, "n": 4}, stopping={"max_tokens": 20})
    assert len({text_of(stream, index) for index in range(4)}) == 4


async def test_each_answer_ends_once_and_the_stream_after_all(pair: Bench) -> None:
    stream = await pair.generate(prompt="hello", sampling={**SEEDED, "n": 3}, stopping={"max_tokens": 9})
    events = [message.WhichOneof("event") for message in stream.messages]
    assert (events[0], events[-1], events.count("answer_finished")) == ("started", "finished", 3)
    assert [message.sequence for message in stream.messages] == list(range(len(events)))
    ends = ends_of(stream)
    assert {(end.reason, end.completion_tokens) for end in ends.values()} == {(sampling_pb2.FINISH_REASON_LENGTH, 9)}
    assert set(ends) == {0, 1, 2}


async def test_no_token_of_an_answer_comes_after_its_end(pair: Bench) -> None:
    stream = await pair.generate(prompt="hello", sampling={**SEEDED, "n": 3}, stopping={"max_tokens": 30})
    for index in ends_of(stream):
        order = [
            message.WhichOneof("event")
            for message in stream.messages
            if (message.token.index if message.HasField("token") else message.answer_finished.index) == index
            and message.WhichOneof("event") in ("token", "answer_finished")
        ]
        assert order[-1] == "answer_finished"


async def test_usage_counts_the_prompt_once_and_all_tokens(pair: Bench) -> None:
    stream = await pair.generate(prompt="hello", sampling={**SEEDED, "n": 3}, stopping={"max_tokens": 9})
    usage = stream.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 27)


async def test_the_other_answers_take_the_prompt_from_the_prefix_cache() -> None:
    async with bench(
        *[simulated(f"p{index}", "prefill") for index in range(3)],
        *[simulated(f"d{index}", "decode") for index in range(3)],
    ) as running:
        stream = await running.generate(prompt="x" * 100, sampling={**SEEDED, "n": 4}, stopping={"max_tokens": 4})
        cached = {index: end.cached_tokens for index, end in ends_of(stream).items()}
        assert cached == {0: 0, 1: 96, 2: 96, 3: 96}


async def test_a_stop_string_ends_one_answer_alone(pair: Bench) -> None:
    second = await pair.text_of(prompt="hello", sampling={**SEEDED, "seed": 8}, stopping={"max_tokens": 40})
    first = await pair.text_of(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 40})
    stop = next(second[at : at + 3] for at in range(5, 30) if second[at : at + 3] not in first)
    stopping = {"max_tokens": 40, "stop": [stop]}
    stream = await pair.generate(prompt="hello", sampling={**SEEDED, "n": 2}, stopping=stopping)
    ends = ends_of(stream)
    assert (ends[0].reason, ends[1].reason) == (
        sampling_pb2.FINISH_REASON_LENGTH,
        sampling_pb2.FINISH_REASON_STOP_STRING,
    )
    assert ends[1].stop_string == stop
    assert text_of(stream, 1) == second[: second.index(stop)]


async def test_the_unary_response_has_all_answers(pair: Bench) -> None:
    request = {"prompt": "hello", "sampling": {**SEEDED, "n": 3}, "stopping": {"max_tokens": 12}}
    stream = await pair.generate(**request)
    unary = await pair.stub.GenerateUnary(
        generate_pb2.GenerateUnaryRequest(request=generate_pb2.GenerateRequest(**request))
    )
    assert [answer.token.text for answer in unary.answers] == [text_of(stream, index) for index in range(3)]
    assert [answer.finished.index for answer in unary.answers] == [0, 1, 2]
    assert unary.token.text == unary.answers[0].token.text
    assert unary.finished.usage.completion_tokens == 36


async def test_a_client_that_leaves_frees_the_blocks_of_every_answer() -> None:
    slow = {"decode_step_seconds": 0.02}
    async with bench(simulated("p1", "prefill", **slow), simulated("d1", "decode", **slow)) as running:
        request = {"prompt": "hello", "sampling": {**SEEDED, "n": 4}, "stopping": {"max_tokens": 2000}}
        async with running_stream(running, 8, **request) as task:
            assert not task.done()
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_cancel_stops_every_answer_on_the_workers() -> None:
    slow = {"decode_step_seconds": 0.02}
    async with bench(simulated("p1", "prefill", **slow), simulated("d1", "decode", **slow)) as running:
        request = {"prompt": "hello", "sampling": {**SEEDED, "n": 3}, "stopping": {"max_tokens": 2000}}
        async with running_stream(running, 12, request_id="mine", **request) as task:
            answer = await running.stub.CancelGeneration(generate_pb2.CancelGenerationRequest(request_id="mine"))
            assert sum(receipt.blocks_freed > 0 for receipt in answer.receipts) == 3
            with pytest.raises(aio.AioRpcError) as failure:
                await task
            assert failure.value.code() == StatusCode.CANCELLED
        await eventually(lambda: running.used_blocks() == 0)


async def test_answers_continue_when_their_decode_worker_is_lost() -> None:
    slow = {"decode_step_seconds": 0.01}
    configs = [simulated(f"d{index}", "decode", **slow) for index in range(2)]
    async with bench(simulated("p1", "prefill", **slow), *configs) as running:
        request = {"prompt": "hello", "sampling": {**SEEDED, "n": 3}, "stopping": {"max_tokens": 60}}
        whole = await running.generate(**request)
        async with running_stream(running, 20, **request) as task:
            busy = max(running.workers.values(), key=lambda worker: worker.engines.load().blocks_used)
            await running.proxies[busy.worker_id].cut()
            stream = await task
        assert [text_of(stream, index) for index in range(3)] == [text_of(whole, index) for index in range(3)]
        assert stream.finished.migrations > 0


async def test_more_answers_than_allowed_are_refused(pair: Bench) -> None:
    with pytest.raises(aio.AioRpcError) as failure:
        await pair.generate(prompt="hello", sampling={"n": 17}, stopping={"max_tokens": 2})
    assert failure.value.code() == StatusCode.INVALID_ARGUMENT
    assert "sampling.n" in (failure.value.details() or "")


async def test_a_tenant_is_charged_for_the_tokens_of_all_answers() -> None:
    quotas = QuotasConfig(default=QuotaConfig(tokens_per_second=10.0, burst_seconds=4.0))
    router = FAST_ROUTER.model_copy(update={"quotas": quotas})
    async with bench(PREFILL, DECODE, router=router) as running:
        await running.generate(prompt="hello", sampling={**SEEDED, "n": 2}, stopping={"max_tokens": 15})
        with pytest.raises(aio.AioRpcError) as failure:
            await running.generate(prompt="hello" * 4, stopping={"max_tokens": 2})
        assert failure.value.code() == StatusCode.RESOURCE_EXHAUSTED


async def test_answers_wait_for_places_that_those_before_them_leave() -> None:
    router = FAST_ROUTER.model_copy(update={"admission": AdmissionConfig(max_running_per_worker=1)})
    async with bench(PREFILL, DECODE, router=router) as running:
        request = {"prompt": "hello", "sampling": {**SEEDED, "n": 3}, "stopping": {"max_tokens": 9}}
        async with asyncio.timeout(10):
            streams = await asyncio.gather(*(running.generate(**request) for _ in range(3)))
        assert [len(ends_of(stream)) for stream in streams] == [3, 3, 3]


async def test_requests_with_several_answers_run_together(pair: Bench) -> None:
    async def ask(seed: int) -> list[str]:
        sampling = {"temperature": 1.0, "seed": seed * 100, "n": 3}
        stream = await pair.generate(prompt="hello", sampling=sampling, stopping={"max_tokens": 15})
        return [text_of(stream, index) for index in range(3)]

    together = await asyncio.gather(*(ask(seed) for seed in range(8)))
    assert together[5] == await ask(5)
