"""Cancelled requests: what is freed, and the receipts."""

import asyncio

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import PREFILL, Bench, bench, simulated
from support.eventually import eventually

from baton.inference.v1 import generate_pb2, timing_pb2

SLOW_DECODE = simulated("d1", "decode", decode_step_seconds=0.02)
SLOW_PREFILL = simulated("p1", "prefill", prefill_base_seconds=1.0)
LONG = generate_pb2.GenerateRequest(prompt="hello", request_id="mine", stopping={"max_tokens": 400})


async def cancel(running: Bench, request_id: str) -> generate_pb2.CancelGenerationResponse:
    return await running.stub.CancelGeneration(generate_pb2.CancelGenerationRequest(request_id=request_id), timeout=60)


async def read_tokens(call: "aio.UnaryStreamCall[object, generate_pb2.GenerateResponse]", count: int) -> None:
    tokens = 0
    while tokens < count:
        tokens += len((await call.read()).token.token_ids)


async def test_a_client_that_leaves_while_decoding_frees_everything() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:
        call = running.stub.Generate(LONG)
        await read_tokens(call, 5)
        assert running.used_blocks() > 0
        call.cancel()
        await eventually(lambda: running.used_blocks() == 0)
        assert running.workers["d1"].engine.load().running == 0


async def test_a_cancel_without_id_and_handle_names_the_field() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:
        with pytest.raises(aio.AioRpcError, match="request_id: is empty, and so is handle") as refused:
            await cancel(running, "")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_leaves_while_prefilling_frees_everything() -> None:
    async with bench(SLOW_PREFILL, SLOW_DECODE) as running:
        call = running.stub.Generate(LONG)
        await eventually(lambda: running.workers["p1"].engine.load().running == 1)
        call.cancel()
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_handoff_that_no_worker_takes_is_released_at_once_and_not_by_its_lease() -> None:
    # The decode worker has no room: the handoff waits there, held, until the client leaves.
    full = simulated("d1", "decode", decode_step_seconds=0.05).model_copy()
    full = full.model_copy(update={"engine": full.engine.model_copy(update={"num_blocks": 2})})
    async with bench(PREFILL, full) as running:
        first = running.stub.Generate(generate_pb2.GenerateRequest(prompt="x" * 16, stopping={"max_tokens": 15}))
        await read_tokens(first, 2)
        second = running.stub.Generate(generate_pb2.GenerateRequest(prompt="y" * 16, stopping={"max_tokens": 15}))
        await read_tokens(second, 1)
        await eventually(lambda: running.workers["p1"].engine.load().blocks_held == 1)
        second.cancel()
        start = asyncio.get_running_loop().time()
        await eventually(lambda: running.workers["p1"].engine.load().blocks_held == 0)
        assert asyncio.get_running_loop().time() - start < 4.0
        first.cancel()


async def test_held_kv_whose_id_is_still_on_its_way_is_freed_when_the_client_leaves() -> None:
    slow = simulated("p1", "prefill", prefill_base_seconds=0.3)
    async with bench(slow, SLOW_DECODE) as running:
        prefill = running.workers["p1"].engine
        call = running.stub.Generate(LONG)
        await eventually(lambda: prefill.load().running == 1)
        running.proxies["p1"].freeze()
        await eventually(lambda: prefill.load().blocks_held == 1)
        call.cancel()
        await asyncio.sleep(0.05)
        await running.proxies["p1"].restore()
        start = asyncio.get_running_loop().time()
        await eventually(lambda: prefill.load().blocks_held == 0)
        assert asyncio.get_running_loop().time() - start < 4.0


@pytest.mark.feature("cancellation", engine="simulated", facade="grpc")
async def test_cancelling_by_id_ends_the_stream_with_cancelled_and_the_reason() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:
        call = running.stub.Generate(LONG)
        await read_tokens(call, 5)
        answer = await cancel(running, "mine")
        assert [(receipt.worker_id, receipt.stage) for receipt in answer.receipts] == [("d1", timing_pb2.STAGE_DECODE)]
        assert answer.receipts[0].blocks_freed > 0
        assert running.used_blocks() == 0
        with pytest.raises(aio.AioRpcError) as caught:
            await read_tokens(call, 1000)
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert caught.value.details() == "cancelled by CancelGeneration"


async def test_cancelling_by_id_stops_a_prefill() -> None:
    async with bench(SLOW_PREFILL, SLOW_DECODE) as running:
        call = running.stub.Generate(LONG)
        await eventually(lambda: running.workers["p1"].engine.load().running == 1)
        answer = await cancel(running, "mine")
        assert [receipt.worker_id for receipt in answer.receipts] == ["p1"]
        assert running.used_blocks() == 0
        with pytest.raises(aio.AioRpcError, match="cancelled by CancelGeneration"):
            await read_tokens(call, 1000)


async def test_cancelling_an_unknown_id_is_not_found(pair: Bench) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await cancel(pair, "unknown")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_an_id_can_be_used_again_after_its_end(pair: Bench) -> None:
    for _ in range(2):
        await pair.generate(prompt="x", request_id="again", stopping={"max_tokens": 2})


async def test_a_hundred_cancelled_streams_leave_nothing_behind() -> None:
    async with bench(PREFILL, SLOW_DECODE) as running:

        async def come_and_go(index: int) -> None:
            request = generate_pb2.GenerateRequest(prompt=f"prompt {index}", stopping={"max_tokens": 100})
            call = running.stub.Generate(request)
            await asyncio.sleep(index / 500)
            call.cancel()

        await asyncio.gather(*(come_and_go(index) for index in range(100)))
        await eventually(lambda: running.used_blocks() == 0)
        assert await running.text_of(prompt="x", stopping={"max_tokens": 3})
