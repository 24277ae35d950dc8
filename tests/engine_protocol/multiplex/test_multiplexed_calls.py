"""Many calls over one stream: each keeps its own answer, error, deadline, metadata and pace."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from opentelemetry.trace import SpanKind
from support.eventually import eventually
from support.recorded_spans import recorded
from support.servers.scripted_router import NAME, scripted
from support.servers.shared_stream import Sharing, get_model, hang

from baton.calls import stream, unary
from baton.engine.v1 import multiplex_pb2, multiplex_pb2_grpc
from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unsupported,
)
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2
from rpc.server import ConnectionLimits
from rpc.tracing.span import current_span, entered
from runtime.aio import timeout


async def count(request: pb.GenerateRequest, context: Any) -> None:
    """Answers, as many as the prompt says."""
    for number in range(int(request.prompt)):
        await context.write(pb.GenerateResponse(sequence=number))


async def test_each_call_gets_its_own_answers_in_order(sharing: Sharing) -> None:
    async with sharing.calls(Generate=count) as calls:
        lengths = [3, 0, 100, 7]
        answers = await asyncio.gather(*(calls.read(str(length)) for length in lengths))
    assert [[answer.sequence for answer in each] for each in answers] == [list(range(length)) for length in lengths]


async def test_all_calls_travel_on_one_call_of_the_connection(sharing: Sharing) -> None:
    methods: list[str] = []

    async def note(request: Any, context: Any) -> model_pb2.GetModelResponse:
        methods.append(type(context).__name__)
        return model_pb2.GetModelResponse()

    async with sharing.calls(GetModel=note) as calls:
        await asyncio.gather(*(unary(calls.stub.GetModel(model_pb2.GetModelRequest())) for _ in range(5)))
    assert methods == ["ServedCall"] * 5


async def test_an_error_keeps_its_class_and_details(sharing: Sharing) -> None:
    async def refuse(request: object, context: object) -> None:
        raise Overloaded("full", retry_after_seconds=2.5, stage="decode", worker_id="d1")

    async with sharing.calls(Generate=refuse) as calls:
        with pytest.raises(Overloaded, match="full") as caught:
            await calls.read()
    assert (caught.value.retry_after_seconds, caught.value.stage, caught.value.worker_id) == (2.5, "decode", "d1")


async def test_an_error_of_one_call_leaves_the_others(sharing: Sharing) -> None:
    async def fail_some(request: pb.GenerateRequest, context: Any) -> None:
        if request.prompt == "bad":
            raise InvalidRequest.of("prompt", "is bad")
        await context.write(pb.GenerateResponse())

    async with sharing.calls(Generate=fail_some) as calls:
        found = await asyncio.gather(*(calls.read(text) for text in ("good", "bad", "good")), return_exceptions=True)
    assert [type(each) for each in found] == [list, InvalidRequest, list]


async def test_an_unknown_method_is_unsupported(sharing: Sharing) -> None:
    async with sharing.calls() as calls, sharing.beside(calls.peer) as channel:
        call = channel.unary_unary("/no.Such/Method", bytes, bytes)
        with pytest.raises(Unsupported):
            await unary(call(b""))


async def test_metadata_arrive_as_they_were_sent(sharing: Sharing) -> None:
    sent = (("x-text", "value"), ("x-bytes-bin", b"\x00\xff"))
    seen: list[tuple[str, str | bytes]] = []

    async def note(request: object, context: Any) -> model_pb2.GetModelResponse:
        seen.extend(context.invocation_metadata())
        return model_pb2.GetModelResponse()

    async with sharing.calls(GetModel=note) as calls:
        await unary(calls.stub.GetModel(model_pb2.GetModelRequest(), metadata=sent))
    assert tuple(seen) == sent


async def test_a_deadline_ends_the_call_on_both_sides(sharing: Sharing) -> None:
    ended = asyncio.Event()

    async def wait(request: object, context: Any) -> None:
        try:
            assert 0 < context.time_remaining() <= 1
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with sharing.calls(Generate=wait) as calls:
        with pytest.raises(DeadlineExceeded):
            await calls.read(timeout=1)
        await ended.wait()


async def test_leaving_a_call_stops_it_on_the_server(sharing: Sharing) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(request: object, context: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with sharing.calls(Generate=wait) as calls:
        reading = asyncio.create_task(calls.read())
        await started.wait()
        reading.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_callback_tells_an_answer_that_was_not_delivered_from_one_that_was(sharing: Sharing) -> None:
    done: list[bool] = []
    started = asyncio.Event()

    async def answer(request: pb.GenerateRequest, context: Any) -> None:
        context.add_done_callback(lambda ended: done.append(ended.done()))
        started.set()
        if request.prompt == "hang":
            await asyncio.Event().wait()

    async with sharing.calls(Generate=answer) as calls:
        await calls.read()
        await eventually(lambda: done == [True])
        started.clear()
        reading = asyncio.create_task(calls.read("hang"))
        await started.wait()
        reading.cancel()
        await eventually(lambda: done == [True, False])


async def test_a_slow_reader_is_waited_for_and_delays_no_other(sharing: Sharing) -> None:
    written = 0

    async def flood(request: pb.GenerateRequest, context: Any) -> None:
        nonlocal written
        for number in range(int(request.prompt)):
            await context.write(pb.GenerateResponse(sequence=number))
            written = number + 1

    async with sharing.calls(Generate=flood) as calls:
        async with aclosing(stream(calls.stub.Generate(pb.GenerateRequest(prompt="100000")))) as slow:
            await slow.__anext__()
            # Paused once it is far enough ahead, and not before the end.
            previous = -1
            while previous != written:
                previous = written
                await asyncio.sleep(0.2)
            assert written < 50_000
            assert len(await calls.read("50")) == 50
            assert written == 50
            numbers = [(await slow.__anext__()).sequence for _ in range(1000)]
        assert numbers == list(range(1, 1001))


async def test_a_large_request_travels_alone(sharing: Sharing) -> None:
    kinds: list[str] = []

    async def note(request: Any, context: Any) -> None:
        kinds.append(type(context).__name__)

    async with sharing.calls(Generate=note) as calls:
        await calls.read("x" * 1_000_000)
        await calls.read("x")
    assert kinds[0] != "ServedCall"
    assert kinds[1] == "ServedCall"


async def test_a_request_that_is_no_message_is_refused_alone(sharing: Sharing) -> None:
    async with sharing.calls(GetModel=get_model) as calls, sharing.beside(calls.peer) as channel:
        call = channel.unary_unary(f"/{NAME}/GetModel", bytes, bytes)
        with pytest.raises(InvalidRequest):
            await unary(call(b"\xff\xff"))
        assert await unary(call(b"")) == model_pb2.GetModelResponse(model=model_pb2.Model()).SerializeToString()


async def test_more_calls_than_allowed_are_refused(sharing: Sharing) -> None:
    async with sharing.calls(Generate=hang, GetModel=get_model, connections=ConnectionLimits(max_streams=4)) as calls:
        waiting = [asyncio.create_task(calls.read()) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await unary(calls.stub.GetModel(model_pb2.GetModelRequest()))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await unary(calls.stub.GetModel(model_pb2.GetModelRequest()))


async def test_a_message_of_too_many_fields_ends_the_stream() -> None:
    many = multiplex_pb2.MultiplexRequest(starts=[multiplex_pb2.CallStart()] * 200_000)
    async with scripted(is_multiplexed=True) as peer, timeout(20):
        call: Any = multiplex_pb2_grpc.MultiplexServiceStub(peer.channel).Multiplex(iter([many]))
        async with aclosing(stream(call)) as answers:
            with pytest.raises(InvalidRequest):
                await answers.__anext__()


async def test_each_call_has_the_trace_of_its_caller(sharing: Sharing) -> None:
    seen: list[str] = []

    async def note(request: object, context: object) -> None:
        seen.append(current_span().trace_id)

    async with recorded() as (tracer, _), sharing.calls(Generate=note, tracer=tracer) as calls:
        spans = [tracer.begin("test", None, SpanKind.CLIENT) for _ in range(2)]
        for span in spans:
            with entered(span):
                await calls.read()
    assert seen == [span.trace_id for span in spans]


async def test_what_was_cancelled_here_is_cancelled(sharing: Sharing) -> None:
    async with sharing.calls(Generate=hang) as calls:
        call = calls.stub.Generate(pb.GenerateRequest())
        asyncio.get_running_loop().call_later(0.05, call.cancel)
        with pytest.raises(Cancelled):
            async for _ in call:
                pass
