"""Many calls over one stream: each keeps its own answer, error, deadline, metadata and pace."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from grpc import aio
from opentelemetry.trace import SpanKind
from support.eventually import eventually
from support.recorded_spans import recorded
from support.servers.scripted_router import NAME, Scripted, scripted
from support.servers.tcp_proxy import TcpProxy

from baton.calls import stream, unary
from baton.engine.v1 import multiplex_pb2, multiplex_pb2_grpc
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
    Unsupported,
)
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import inference_service_pb2_grpc as inference
from baton.inference.v1 import model_pb2
from rpc.channels import open_channel
from rpc.multiplex.channel import multiplexed
from rpc.multiplex.peer_stream import stream_dialer
from rpc.server import ConnectionLimits, ServerKind
from rpc.tracing.span import current_span, entered
from runtime.aio import timeout


@dataclass(frozen=True, slots=True)
class Shared:
    """A scripted server, and a stub whose calls share a stream to it."""

    peer: Scripted
    stub: inference.InferenceServiceStub

    async def read(self, prompt: str = "", **options: Any) -> list[pb.GenerateResponse]:
        """All answers of one call of Generate."""
        async with aclosing(stream(self.stub.Generate(pb.GenerateRequest(prompt=prompt), **options))) as answers:
            return [answer async for answer in answers]


class Sharing:
    """Channels whose calls share a stream of grpc.aio, or of our own."""

    def __init__(self, kind: ServerKind) -> None:
        self._dial = stream_dialer(kind, None)

    def channel(self, channel: aio.Channel, address: str) -> AbstractAsyncContextManager[aio.Channel]:
        """One on top of the channel to an address."""
        return multiplexed(channel, self._dial(address, channel))

    def beside(self, peer: Scripted) -> AbstractAsyncContextManager[aio.Channel]:
        """One to a scripted server."""
        return self.channel(peer.channel, peer.server.address)

    @asynccontextmanager
    async def calls(self, **options: Any) -> AsyncIterator[Shared]:
        """Calls to a server with these methods."""
        async with scripted(is_multiplexed=True, **options) as peer, timeout(20), self.beside(peer) as channel:
            yield Shared(peer, inference.InferenceServiceStub(channel))


@pytest.fixture(params=get_args(ServerKind))
def sharing(request: pytest.FixtureRequest) -> Sharing:
    return Sharing(request.param)


async def count(request: pb.GenerateRequest, context: Any) -> None:
    """As many answers as the prompt says."""
    for number in range(int(request.prompt)):
        await context.write(pb.GenerateResponse(sequence=number))


async def get_model(request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
    return model_pb2.GetModelResponse(model=model_pb2.Model(name=request.name))


async def hang(request: object, context: object) -> None:
    await asyncio.Event().wait()


async def eventually_answers(stub: inference.InferenceServiceStub) -> None:
    """Calls until gRPC has connected again."""
    while True:
        try:
            await unary(stub.GetModel(model_pb2.GetModelRequest()))
        except Unavailable:
            await asyncio.sleep(0.05)
        else:
            return


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


async def test_a_lost_connection_is_unavailable_to_all_its_calls_and_the_next_one_opens_another(
    sharing: Sharing,
) -> None:
    async with (
        scripted(is_multiplexed=True, Generate=hang, GetModel=get_model) as peer,
        TcpProxy(peer.server.address) as proxy,
        timeout(20),
        open_channel(proxy.address) as channel,
        sharing.channel(channel, proxy.address) as calls,
    ):
        stub = inference.InferenceServiceStub(calls)
        waiting = [asyncio.create_task(Shared(peer, stub).read()) for _ in range(3)]
        await unary(stub.GetModel(model_pb2.GetModelRequest()))
        await proxy.cut()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in found] == [Unavailable] * 3
        await proxy.restore()
        await eventually_answers(stub)


async def test_a_connection_that_is_lost_while_requests_are_written_is_unavailable(sharing: Sharing) -> None:
    """Of a write that meets a lost connection gRPC says INTERNAL, which would end requests that others can serve."""
    async with scripted(is_multiplexed=True, GetModel=get_model, Generate=without_end) as peer:
        for _ in range(60):
            async with (
                TcpProxy(peer.server.address) as proxy,
                open_channel(proxy.address) as connection,
                sharing.channel(connection, proxy.address) as channel,
            ):
                stub = inference.InferenceServiceStub(channel)
                calls = [asyncio.create_task(ask_without_end(stub)) for _ in range(5)]
                calls += [asyncio.create_task(Shared(peer, stub).read()) for _ in range(3)]
                await asyncio.sleep(0.02)
                await proxy.cut()
                found = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(error) for error in found} == {Unavailable}, found


async def without_end(request: pb.GenerateRequest, context: Any) -> None:
    while True:
        await context.write(pb.GenerateResponse())
        await asyncio.sleep(0)


async def ask_without_end(stub: inference.InferenceServiceStub) -> None:
    """One call after the other. Raises the error of the first that fails."""
    while True:
        await unary(stub.GetModel(model_pb2.GetModelRequest(), timeout=60))


async def test_a_server_that_ends_is_unavailable_to_the_calls_that_run(sharing: Sharing) -> None:
    async with AsyncExitStack() as stack, timeout(20):
        peer = await stack.enter_async_context(
            scripted(drain_seconds=0, is_multiplexed=True, Generate=hang, GetModel=get_model)
        )
        async with open_channel(peer.server.address) as channel, sharing.channel(channel, peer.server.address) as calls:
            stub = inference.InferenceServiceStub(calls)
            reading = asyncio.create_task(Shared(peer, stub).read())
            await unary(stub.GetModel(model_pb2.GetModelRequest()))
            await stack.aclose()
            with pytest.raises(Unavailable):
                await reading


async def test_an_unreachable_server_is_unavailable(sharing: Sharing) -> None:
    async with scripted() as peer:
        pass
    async with (
        open_channel(peer.server.address) as channel,
        sharing.channel(channel, peer.server.address) as calls,
        timeout(20),
    ):
        with pytest.raises(Unavailable):
            await unary(inference.InferenceServiceStub(calls).GetModel(model_pb2.GetModelRequest()))


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


async def test_no_code_of_a_call_runs_once_the_stream_has_ended(sharing: Sharing) -> None:
    running = 0

    async def wait(request: object, context: object) -> None:
        nonlocal running
        running += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            running -= 1

    async with scripted(is_multiplexed=True, Generate=wait) as peer, timeout(20):
        async with sharing.beside(peer) as channel:
            stub = inference.InferenceServiceStub(channel)
            reading = [asyncio.create_task(Shared(peer, stub).read()) for _ in range(8)]
            await eventually(lambda: running == 8)
        await eventually(lambda: running == 0)
        found = await asyncio.gather(*reading, return_exceptions=True)
    assert all(isinstance(each, BatonError) for each in found)
