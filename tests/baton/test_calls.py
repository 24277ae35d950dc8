"""Calls as callers see them: BatonErrors, and cancelling in both directions."""

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import pytest
from grpc import aio
from support.cluster.processes import free_port
from support.eventually import eventually
from support.servers.scripted_router import scripted

from baton.calls import stream, unary
from baton.connection.settings import MAX_RECEIVE_BYTES
from baton.errors import BatonError, Cancelled, DeadlineExceeded, InvalidRequest, NoWorker, Unavailable
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel
from runtime.aio import timeout


class Hanging:
    """Methods that never answer, and know whether they were cancelled."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0

    async def answer(self, request: object, context: object) -> None:
        await self._hang()

    async def generate(self, request: object, context: aio.ServicerContext) -> None:
        await context.write(pb.GenerateResponse(sequence=0))
        await self._hang()

    async def _hang(self) -> None:
        self.started += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def count_to(count: int) -> AsyncGenerator[pb.GenerateResponse, None]:
    for sequence in range(count):
        yield pb.GenerateResponse(sequence=sequence)


async def test_a_call_gives_its_answer() -> None:
    async def get_model(request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=model_pb2.Model(name=request.name))

    async with scripted(GetModel=get_model) as peer:
        response = await unary(peer.stub.GetModel(model_pb2.GetModelRequest(name="demo")))
    assert response.model.name == "demo"


async def test_a_stream_gives_its_answers_in_order() -> None:
    async def generate(request: object, context: object) -> AsyncGenerator[pb.GenerateResponse, None]:
        async for response in count_to(100):
            yield response

    async with scripted(Generate=generate) as peer:
        call = peer.stub.Generate(pb.GenerateRequest())
        assert [response.sequence async for response in stream(call)] == list(range(100))


async def test_a_failed_stream_gives_what_came_before_it_failed() -> None:
    async def generate(request: object, context: object) -> AsyncGenerator[pb.GenerateResponse, None]:
        async for response in count_to(100):
            yield response
        raise NoWorker("all gone")

    received = []
    async with scripted(Generate=generate) as peer:
        with pytest.raises(NoWorker, match="all gone"):  # noqa: PT012
            async for response in stream(peer.stub.Generate(pb.GenerateRequest())):
                received.append(response.sequence)
    assert received == list(range(100))


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with open_channel(f"127.0.0.1:{free_port()}") as channel:
        with pytest.raises(Unavailable):
            await unary(InferenceServiceStub(channel).GetModel(model_pb2.GetModelRequest()))


async def test_peers_are_reached_directly_whatever_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get_model(request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse()

    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    async with scripted(GetModel=get_model) as peer:
        await unary(peer.stub.GetModel(model_pb2.GetModelRequest(), timeout=60))


async def test_a_deadline_that_passes_is_deadline_exceeded() -> None:
    async with scripted(GetModel=Hanging().answer) as peer:
        with pytest.raises(DeadlineExceeded):
            await unary(peer.stub.GetModel(model_pb2.GetModelRequest(), timeout=0.05))


async def test_cancelling_the_task_cancels_the_call() -> None:
    peer_side = Hanging()
    async with scripted(GetModel=peer_side.answer) as peer:
        with pytest.raises(TimeoutError):
            async with timeout(0.2):
                await unary(peer.stub.GetModel(model_pb2.GetModelRequest()))
        await eventually(lambda: peer_side.cancelled == 1)


async def test_cancelling_the_reader_of_a_stream_cancels_the_call() -> None:
    peer_side = Hanging()
    async with scripted(Generate=peer_side.generate) as peer:
        responses = stream(peer.stub.Generate(pb.GenerateRequest()))
        await anext(responses)
        with pytest.raises(TimeoutError):
            async with timeout(0.2):
                await anext(responses)
        await eventually(lambda: peer_side.cancelled == 1)


async def test_closing_a_stream_cancels_the_call() -> None:
    peer_side = Hanging()
    async with scripted(Generate=peer_side.generate) as peer:
        async with aclosing(stream(peer.stub.Generate(pb.GenerateRequest()))) as responses:
            await anext(responses)
        await eventually(lambda: peer_side.cancelled == 1)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 cannot tell whose cancellation it was")
async def test_closing_the_channel_under_a_call_does_not_look_like_cancelling_the_task() -> None:
    peer_side = Hanging()
    async with scripted(GetModel=peer_side.answer) as peer:
        task = asyncio.ensure_future(unary(peer.stub.GetModel(model_pb2.GetModelRequest())))
        await eventually(lambda: peer_side.started == 1)
        await peer.channel.close()
        with pytest.raises(Cancelled):
            await task


async def test_a_request_over_the_size_limit_is_an_invalid_request() -> None:
    async with scripted(Generate=Hanging().generate) as peer:
        request = pb.GenerateRequest(prompt="x" * (MAX_RECEIVE_BYTES + 1))
        with pytest.raises(InvalidRequest, match="larger than max"):
            await anext(stream(peer.stub.Generate(request)))


async def test_a_request_of_tens_of_megabytes_arrives() -> None:
    async def generate(request: pb.GenerateRequest, context: aio.ServicerContext) -> None:
        await context.write(pb.GenerateResponse(sequence=len(request.prompt)))

    async with scripted(Generate=generate) as peer:
        call = peer.stub.Generate(pb.GenerateRequest(prompt="x" * 40_000_000))
        assert [response.sequence async for response in stream(call)] == [40_000_000]


async def test_a_call_that_grpc_cannot_make_is_an_error_of_ours() -> None:
    async with scripted() as peer:
        wrong = (("x-name", "Jörg"),)
        with pytest.raises(BatonError, match="could not make the call"):
            await unary(peer.stub.GetModel(model_pb2.GetModelRequest(), metadata=wrong, timeout=60))
        # Of streams gRPC says it by a status.
        with pytest.raises(BatonError):
            async for _ in stream(peer.stub.Generate(pb.GenerateRequest(), metadata=wrong, timeout=60)):
                pass


async def test_an_error_that_comes_just_after_the_caller_has_left_is_not_lost() -> None:
    ends = asyncio.Event()

    async def generate(request: object, context: aio.ServicerContext) -> None:
        await context.write(pb.GenerateResponse(sequence=0))
        await ends.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")

    async def read(begun: asyncio.Event) -> None:
        async with aclosing(stream(peer.stub.Generate(pb.GenerateRequest()))) as responses:
            async for _ in responses:
                begun.set()

    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context["message"]))
    async with scripted(Generate=generate) as peer:
        for steps in range(300):
            ends.clear()
            begun = asyncio.Event()
            reading = asyncio.create_task(read(begun))
            await begun.wait()
            ends.set()
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled() or isinstance(reading.exception(), BatonError)
    gc.collect()
    assert lost == []
