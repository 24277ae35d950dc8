"""A worker's calls over a shared stream: the same answers, errors, aborts and faults as over streams of their own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import get_args

import pytest
from support.clients.worker_calls import WorkerCalls, decode_request
from support.cluster.workers import Running, Starter
from support.eventually import eventually

from baton.calls import stream
from baton.engine.v1 import decode_pb2
from baton.errors import Cancelled, EngineFailed, Overloaded, RequestExists, Unavailable
from baton.inference.v1 import timing_pb2
from discovery.record import MULTIPLEX
from engine_protocol.fault_injection import FAULT_KEY
from engine_protocol.multiplex.channel import multiplexed
from engine_protocol.multiplex.peer_stream import stream_dialer
from rpc.channels import open_channel
from rpc.server import ServerKind
from runtime.aio import timeout

Sharing = Callable[[Running], AbstractAsyncContextManager[WorkerCalls]]


@pytest.fixture(params=get_args(ServerKind))
def sharing(request: pytest.FixtureRequest) -> Sharing:
    """The worker's services on one stream, of grpc.aio or of our own; control goes by its own calls."""
    dial = stream_dialer(request.param, None)

    @asynccontextmanager
    async def calls_of(running: Running) -> AsyncIterator[WorkerCalls]:
        address = running.worker.address
        async with timeout(30), open_channel(address) as channel, multiplexed(channel, dial(address, channel)) as calls:
            shared = WorkerCalls(address, calls)
            shared.worker = running.calls.worker
            yield shared

    return calls_of


async def test_a_worker_says_that_it_takes_shared_streams(decode: Running) -> None:
    [record] = decode.registry.workers()
    assert MULTIPLEX in record.capabilities


async def test_handed_over_requests_give_the_ids_that_calls_of_their_own_give(
    prefill: Running, decode: Running, sharing: Sharing
) -> None:
    texts = [f"request {number} ".encode() * 4 for number in range(8)]
    alone = [await decode.calls.decode(decode_request(request_id="alone", text=text)) for text in texts]

    async def whole(number: int, text: bytes) -> list[int]:
        handoff = await prefills.prefill(f"r{number}", text)
        rest = await decodes.decode(decode_request(handoff, f"r{number}", text))
        assert rest.accepted is not None
        assert rest.finished is not None
        return [handoff.first_token.token_id, *rest.token_ids]

    async with sharing(prefill) as prefills, sharing(decode) as decodes:
        found = await asyncio.gather(*(whole(number, text) for number, text in enumerate(texts)))
    assert found == [one.token_ids for one in alone]


async def test_tokens_of_several_requests_arrive_in_one_message_a_step(start: Starter, sharing: Sharing) -> None:
    async with start("decode", decode_step_seconds=0.02) as decode, sharing(decode) as calls:
        requests = [decode_request(request_id=f"r{number}", text=f"text {number}".encode()) for number in range(8)]
        found = await asyncio.gather(*(calls.decode(request) for request in requests))
    assert [len(one.token_ids) for one in found] == [20] * 8


async def test_timings_say_what_the_steps_took(start: Starter, sharing: Sharing) -> None:
    async with start("decode", decode_step_seconds=0.01) as decode, sharing(decode) as calls:
        decoded = await calls.decode(decode_request())
    seconds = decoded.timing(timing_pb2.STAGE_DECODE).duration.ToNanoseconds() / 1e9
    assert 0.15 < seconds < 20


async def test_an_abort_stops_a_call_and_says_what_it_freed(start: Starter, sharing: Sharing) -> None:
    async with start("decode", decode_step_seconds=0.01) as decode, sharing(decode) as calls:
        call = calls.decodes.Decode(decode_request(max_tokens=800, text=b"x" * 40))
        async with aclosing(stream(call)) as answers:
            async for answer in answers:
                if answer.HasField("tokens"):
                    break
            receipt = await calls.abort()
            with pytest.raises(Cancelled):
                async for _ in answers:
                    pass
    assert receipt.found
    assert receipt.stage == timing_pb2.STAGE_DECODE
    assert receipt.blocks_freed > 0


async def test_leaving_a_call_frees_its_blocks(start: Starter, sharing: Sharing) -> None:
    async with start("decode", decode_step_seconds=0.01) as decode, sharing(decode) as calls:
        async with aclosing(stream(calls.decodes.Decode(decode_request(max_tokens=800)))) as answers:
            async for answer in answers:
                if answer.HasField("tokens"):
                    break
        await eventually(lambda: decode.blocks_used == 0)


async def test_the_end_of_the_stream_frees_the_blocks_of_all_its_calls(start: Starter, sharing: Sharing) -> None:
    async with start("decode", decode_step_seconds=0.01, num_blocks=512) as decode:
        async with sharing(decode) as calls:
            running = [
                asyncio.create_task(calls.decode(decode_request(request_id=f"r{number}", max_tokens=1000)))
                for number in range(4)
            ]
            await eventually(lambda: decode.worker.engines.load().running == 4)
        found = await asyncio.gather(*running, return_exceptions=True)
        assert [type(one) for one in found] == [Unavailable] * 4
        await eventually(lambda: decode.blocks_used == 0)


async def test_a_request_that_runs_already_is_refused_with_its_stage_and_worker(
    start: Starter, sharing: Sharing
) -> None:
    async with start("decode", decode_step_seconds=0.01) as decode, sharing(decode) as calls:
        running = asyncio.create_task(calls.decode(decode_request(max_tokens=800)))
        await eventually(lambda: decode.worker.engines.load().running == 1)
        with pytest.raises(RequestExists) as caught:
            await calls.decode(decode_request())
        running.cancel()
        assert (caught.value.stage, caught.value.worker_id) == ("decode", decode.worker.worker_id)


async def test_too_many_waiting_requests_are_refused_with_a_time_to_retry(start: Starter, sharing: Sharing) -> None:
    async with (
        start("decode", max_batch=1, max_waiting=1, decode_step_seconds=0.01) as decode,
        sharing(decode) as calls,
    ):
        found = await asyncio.gather(
            *(calls.decode(decode_request(request_id=f"r{number}")) for number in range(4)), return_exceptions=True
        )
    refused = [one for one in found if isinstance(one, Overloaded)]
    assert refused
    assert all(one.retry_after_seconds > 0 for one in refused)


async def test_a_failing_engine_fails_its_calls(start: Starter, sharing: Sharing) -> None:
    async with start("decode", fail_after_tokens=5) as decode, sharing(decode) as calls:
        with pytest.raises(EngineFailed):
            await calls.decode(decode_request())


async def test_planned_faults_happen_at_their_token(start: Starter, sharing: Sharing) -> None:
    async with start("decode", allow_faults=True) as decode, sharing(decode) as calls:
        call = calls.decodes.Decode(decode_request(), metadata=((FAULT_KEY, "drop@decode:7"),))
        ids: list[int] = []

        async def read() -> None:
            async with aclosing(stream(call)) as answers:
                async for answer in answers:
                    ids.extend(answer.tokens.token_ids)

        with pytest.raises(Unavailable, match="decode"):
            await read()
    assert len(ids) == 7


async def test_log_probabilities_come_with_their_tokens(start: Starter, sharing: Sharing) -> None:
    async with start("decode") as decode, sharing(decode) as calls:
        request = decode_request(max_tokens=6)
        request.sampling.logprobs = 2
        tokens: list[decode_pb2.DecodedTokens] = []
        async with aclosing(stream(calls.decodes.Decode(request))) as answers:
            async for answer in answers:
                if answer.HasField("tokens"):
                    tokens.append(answer.tokens)
    assert sum(len(one.logprobs) for one in tokens) == sum(len(one.token_ids) for one in tokens) == 6


async def test_a_reader_that_pauses_gets_all_tokens_in_order(start: Starter, sharing: Sharing) -> None:
    async with start("decode", num_blocks=256) as decode, sharing(decode) as calls:
        whole = await decode.calls.decode(decode_request(request_id="whole", max_tokens=600))
        ids: list[int] = []
        async with aclosing(stream(calls.decodes.Decode(decode_request(max_tokens=600)))) as answers:
            async for answer in answers:
                ids += answer.tokens.token_ids
                if len(ids) < 5:
                    await asyncio.sleep(0.2)
                    other = await calls.decode(decode_request(request_id=f"other{len(ids)}", max_tokens=5))
                    assert len(other.token_ids) == 5
    assert ids == whole.token_ids
