"""CancelGeneration at each stage of a request: the receipts, and that the blocks are freed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.eventually import eventually
from support.images.simulated_workers import about, multimodal, sample

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, timing_pb2
from discovery.memory import MemoryRegistry
from services.config import WorkerConfig
from services.server import host_worker

Call = aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]

ALLOWING = FAST_ROUTER.model_copy(update={"allow_faults": True})
PROMPT_TOKENS = 64  # four blocks
PROMPT = "x" * PROMPT_TOKENS
PAIR = (multimodal("p1", "prefill"), multimodal("d1", "decode"))


def prefill(**engine: object) -> WorkerConfig:
    return simulated("p1", "prefill", allow_faults=True, **engine)


def decode(**engine: object) -> WorkerConfig:
    return simulated("d1", "decode", allow_faults=True, **engine)


@asynccontextmanager
async def stuck(plan: str, *workers: WorkerConfig) -> AsyncIterator[tuple[Bench, Call]]:
    """A request that a fault plan holds up somewhere."""
    async with bench(*(workers or (prefill(), decode())), router=ALLOWING) as running:
        yield running, send(running.stub, plan)


def send(stub: inference_service_pb2_grpc.InferenceServiceStub, plan: str, **fields: object) -> Call:
    request = generate_pb2.GenerateRequest(
        **{"request_id": "mine", "prompt": PROMPT, "stopping": {"max_tokens": 400}, **fields}  # type: ignore[arg-type]
    )
    call: Call = stub.Generate(request, timeout=60, metadata=(("x-baton-fault", plan),) if plan else ())
    return call


async def cancel(running: Bench, call: Call) -> dict[str, generate_pb2.CancelReceipt]:
    """The receipts by worker. When they come, no block is in use any more, and the stream has its status."""
    request = generate_pb2.CancelGenerationRequest(request_id="mine")
    answer = await running.stub.CancelGeneration(request, timeout=60)
    assert running.used_blocks() == 0
    with pytest.raises(aio.AioRpcError) as caught:
        await read_to_the_end(call)
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    assert all(0 <= receipt.milliseconds < 1000 for receipt in answer.receipts)
    return {receipt.worker_id: receipt for receipt in answer.receipts}


async def read_to_the_end(call: Call) -> None:
    while await call.read() is not aio.EOF:
        pass


def facts(receipt: generate_pb2.CancelReceipt) -> tuple[str, int, int]:
    stage = timing_pb2.Stage.Name(receipt.stage).removeprefix("STAGE_").lower()
    return stage, receipt.tokens_discarded, receipt.blocks_freed


async def test_a_queued_request_had_nothing() -> None:
    async with stuck("hang@queue") as (running, call):
        await eventually(lambda: running.workers["p1"].drainer.progress.running == 1)
        receipts = await cancel(running, call)
        assert {worker: facts(receipt) for worker, receipt in receipts.items()} == {"p1": ("prefill_queue", 0, 0)}


async def test_a_request_that_waits_for_a_place_in_the_batch_had_nothing() -> None:
    async with bench(prefill(max_batch=1, prefill_base_seconds=2.0), decode(), router=ALLOWING) as running:
        first = send(running.stub, "", request_id="first")
        await eventually(lambda: running.workers["p1"].engine.load().running == 1)
        call = send(running.stub, "")
        await eventually(lambda: running.workers["p1"].engine.load().waiting == 1)
        answer = await running.stub.CancelGeneration(generate_pb2.CancelGenerationRequest(request_id="mine"))
        assert [facts(receipt) for receipt in answer.receipts] == [("prefill_queue", 0, 0)]
        first.cancel()
        call.cancel()


async def test_a_prefill_in_the_middle_gives_back_what_it_had_computed() -> None:
    slow = prefill(prefill_chunk_tokens=16, prefill_base_seconds=1.0)
    async with stuck("", slow, decode()) as (running, call):
        load = running.workers["p1"].engine.load
        await eventually(lambda: 0 < load().waiting_prefill_tokens < PROMPT_TOKENS)
        stage, tokens, blocks = facts((await cancel(running, call))["p1"])
        assert stage == "prefill_compute"
        assert tokens in (16, 32, 48)
        assert blocks == 4


async def test_held_kv_is_freed_on_the_prefill_worker() -> None:
    async with stuck("hang@queue;role=decode") as (running, call):
        await eventually(lambda: running.workers["d1"].drainer.progress.running == 1)
        receipts = await cancel(running, call)
        assert facts(receipts["p1"]) == ("handoff_wait", PROMPT_TOKENS, 4)
        assert facts(receipts["d1"]) == ("decode_queue", 0, 0)


async def test_a_pull_is_stopped_on_both_sides() -> None:
    async with stuck("hang@pull") as (running, call):
        await eventually(lambda: running.workers["d1"].engine.load().blocks_used == 4)
        receipts = await cancel(running, call)
        assert facts(receipts["p1"]) == ("handoff_wait", PROMPT_TOKENS, 4)
        assert facts(receipts["d1"]) == ("handoff_transfer", PROMPT_TOKENS, 4)


async def test_a_decode_gives_back_prompt_and_answer() -> None:
    async with stuck("hang@decode:17") as (running, call):
        tokens = 0
        while tokens < 17:
            tokens += len((await call.read()).token.token_ids)
        receipts = await cancel(running, call)
        assert list(receipts) == ["d1"]
        stage, discarded, blocks = facts(receipts["d1"])
        assert stage == "decode"
        assert discarded >= PROMPT_TOKENS + 16
        # The next token may have a block already.
        assert -(-discarded // 16) <= blocks <= discarded // 16 + 1


async def test_an_answer_that_its_client_does_not_read_is_stopped_too() -> None:
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    slow = decode(decode_step_seconds=0.001)
    async with (
        bench(prefill(), slow, router=ALLOWING) as running,
        aio.insecure_channel(running.address, narrow) as channel,
    ):
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        call = send(stub, "", stopping={"max_tokens": 8000}, response={"logprobs": 20})
        await eventually(lambda: running.workers["d1"].engine.load().blocks_used > 40)
        answer = await running.stub.CancelGeneration(
            generate_pb2.CancelGenerationRequest(request_id="mine"), timeout=60
        )
        assert running.used_blocks() == 0
        assert [(receipt.worker_id, facts(receipt)[0]) for receipt in answer.receipts] == [("d1", "decode")]
        assert answer.receipts[0].blocks_freed > 40
        with pytest.raises(aio.AioRpcError, match="cancelled by CancelGeneration"):
            await read_to_the_end(call)


async def test_ten_cancelled_long_prefills_do_not_hold_up_the_next_request() -> None:
    slow = prefill(prefill_tokens_per_second=4000, prefill_chunk_tokens=256)
    async with bench(slow, decode(), router=ALLOWING) as running:
        alone = await seconds_to_first_token(running, "alone")
        calls = [send(running.stub, "", request_id=f"r{i}", prompt=chr(65 + i) * 8000) for i in range(10)]
        await eventually(lambda: running.workers["p1"].drainer.progress.running == 10)
        for call in calls:
            call.cancel()
        # All ten would take 20 s.
        assert await seconds_to_first_token(running, "after") < alone + 10.0
        assert running.used_blocks() == 0


async def seconds_to_first_token(running: Bench, prompt: str) -> float:
    started = asyncio.get_running_loop().time()
    call = send(running.stub, "", request_id=prompt, prompt=prompt, stopping={"max_tokens": 1})
    while not (await call.read()).token.token_ids:
        pass
    return asyncio.get_running_loop().time() - started


async def test_a_handoff_whose_owner_has_left_the_registry_is_still_given_back() -> None:
    async with bench(decode(), router=ALLOWING) as running:
        own = MemoryRegistry("test")
        async with host_worker(prefill(), own) as owner:
            async with running.registry.register(own.workers()[0]):
                await running.ready(2)
                call = send(running.stub, "hang@queue;role=decode")
                await eventually(lambda: running.workers["d1"].drainer.progress.running == 1)
            await running.ready(1)
            assert owner.engine.load().blocks_held == 4
            receipts = await cancel(running, call)
            assert facts(receipts["p1"]) == ("handoff_wait", PROMPT_TOKENS, 4)
            assert owner.engine.load().blocks_held == 0


async def test_a_decode_is_cancelled_after_its_prefill_worker_has_left() -> None:
    async with bench(decode(), router=ALLOWING) as running:
        own = MemoryRegistry("test")
        async with host_worker(prefill(), own):
            async with running.registry.register(own.workers()[0]):
                await running.ready(2)
                call = send(running.stub, "hang@decode:17")
                await eventually(lambda: running.workers["d1"].engine.load().blocks_used > 4)
            await running.ready(1)
            receipts = await cancel(running, call)
            assert {worker: facts(receipt)[0] for worker, receipt in receipts.items()} == {"d1": "decode"}


async def test_an_encoding_in_the_middle_is_stopped() -> None:
    async with bench(multimodal("e1", "encode", encode_seconds=20.0), *PAIR) as running:
        call = running.stub.Generate(asking("mine"), timeout=60)
        await eventually(lambda: running.workers["e1"].drainer.progress.running == 1)
        receipts = await cancel(running, call)
        assert {worker: facts(receipt) for worker, receipt in receipts.items()} == {"e1": ("encode", 0, 0)}
        assert running.workers["e1"].drainer.progress.running == 0


async def test_an_encoding_that_another_request_waits_for_goes_on() -> None:
    async with bench(multimodal("e1", "encode", encode_seconds=1.0), *PAIR) as running:
        misses = sample("baton_embedding_cache_misses_total")
        call = running.stub.Generate(asking("mine"), timeout=60)
        other = running.stub.Generate(asking("other"), timeout=60)
        await eventually(lambda: sample("baton_embedding_cache_misses_total") == misses + 2)
        assert await cancel(running, call) == {}
        await read_to_the_end(other)
        assert await other.code() is grpc.StatusCode.OK


def asking(request_id: str) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(request_id=request_id, **about())  # type: ignore[arg-type]
