"""The interceptors of a server: errors of unary calls and streams, and one log line."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from grpc import StatusCode, aio
from structlog.processors import format_exc_info
from structlog.testing import capture_logs
from support.eventually import eventually
from support.servers.scripted_router import scripted, status_of

from baton.errors import HandoffLost, NoWorker
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2
from runtime.aio import TaskGroup
from runtime.telemetry.logs import add_log_fields, configure_logging

Stream = Callable[[pb.GenerateRequest, Any], Any]


def writing(error: BaseException) -> Stream:
    async def generate(request: pb.GenerateRequest, context: aio.ServicerContext) -> None:
        await context.write(pb.GenerateResponse(sequence=0))
        raise error

    return generate


def yielding(error: BaseException) -> Stream:
    async def generate(request: pb.GenerateRequest, context: object) -> AsyncGenerator[pb.GenerateResponse, None]:
        yield pb.GenerateResponse(sequence=0)
        raise error

    return generate


def answering(error: BaseException) -> Callable[[model_pb2.GetModelRequest, Any], Any]:
    async def get_model(request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
        raise error

    return get_model


async def failure(**methods: Callable[..., Any]) -> aio.AioRpcError:
    async with scripted(**methods) as peer:
        if "Generate" in methods:
            return await status_of(peer.stub.Generate(pb.GenerateRequest(request_id="r-1")))
        return await status_of(peer.stub.GetModel(model_pb2.GetModelRequest()))


@pytest.mark.parametrize("stream", [writing, yielding])
async def test_an_error_ends_a_stream_with_its_status(stream: Callable[[BaseException], Stream]) -> None:
    error = await failure(Generate=stream(HandoffLost("h-1 is gone")))
    assert (error.code(), error.details()) == (StatusCode.ABORTED, "h-1 is gone")


@pytest.mark.parametrize("stream", [writing, yielding])
async def test_an_unexpected_error_in_a_stream_is_internal(stream: Callable[[BaseException], Stream]) -> None:
    assert (await failure(Generate=stream(KeyError("secret")))).code() is StatusCode.INTERNAL


async def test_an_unexpected_error_is_logged_with_its_traceback() -> None:
    with capture_logs(processors=[format_exc_info]) as lines:
        await failure(GetModel=answering(ZeroDivisionError("by zero")))
    (line,) = [line for line in lines if line["event"] == "call failed"]
    assert "Traceback" in line["exception"]
    assert "ZeroDivisionError: by zero" in line["exception"]


async def test_an_error_that_a_task_group_wrapped_keeps_its_status() -> None:
    async def get_model(request: object, context: object) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(answering(NoWorker("none is ready"))(model_pb2.GetModelRequest(), context))

    error = await failure(GetModel=get_model)
    assert (error.code(), error.details()) == (StatusCode.UNAVAILABLE, "none is ready")


async def test_an_unexpected_error_beside_a_known_one_is_internal() -> None:
    async def get_model(request: object, context: object) -> None:
        async with TaskGroup() as tasks:
            for error in (NoWorker("none is ready"), KeyError("bug")):
                tasks.create_task(answering(error)(model_pb2.GetModelRequest(), context))

    assert (await failure(GetModel=get_model)).code() is StatusCode.INTERNAL


async def test_a_status_that_a_servicer_aborted_with_is_kept() -> None:
    async def get_model(request: object, context: aio.ServicerContext) -> None:
        await context.abort(StatusCode.DATA_LOSS, "as I said")

    with capture_logs() as lines:
        error = await failure(GetModel=get_model)
    assert (error.code(), error.details()) == (StatusCode.DATA_LOSS, "as I said")
    assert [(line["event"], line["code"]) for line in lines] == [("call ended", "DATA_LOSS")]


async def test_a_method_that_is_left_out_is_unimplemented() -> None:
    error = await failure()
    assert error.code() is StatusCode.UNIMPLEMENTED
    assert error.details() == "this method is not implemented here"


@pytest.mark.parametrize("kind", ["writes", "yields"])
async def test_cancelling_a_stream_ends_the_servicer_in_its_own_task(kind: str) -> None:
    ended: list[bool] = []
    tasks: set[object] = set()

    async def tokens() -> AsyncGenerator[pb.GenerateResponse, None]:
        tasks.add(asyncio.current_task())
        try:
            while True:
                yield pb.GenerateResponse(token=pb.TokenDelta(text="x" * 10_000))
        finally:
            tasks.add(asyncio.current_task())
            ended.append(True)

    async def writes(request: object, context: aio.ServicerContext) -> None:
        generator = tokens()
        try:
            async for token in generator:
                await context.write(token)
        finally:
            await generator.aclose()

    async def yields(request: object, context: object) -> AsyncGenerator[pb.GenerateResponse, None]:
        async for token in (generator := tokens()):
            try:
                yield token
            except GeneratorExit:
                await generator.aclose()
                raise

    async with scripted(Generate={"writes": writes, "yields": yields}[kind]) as peer:
        call = peer.stub.Generate(pb.GenerateRequest())
        await call.read()
        await asyncio.sleep(0.05)  # lets flow control block the servicer in a write
        call.cancel()
        await eventually(lambda: bool(ended))
    assert len(tasks) == 1


async def test_a_cancelled_stream_logs_no_error() -> None:
    async def generate(request: object, context: aio.ServicerContext) -> None:
        while True:
            await context.write(pb.GenerateResponse(token=pb.TokenDelta(text="x" * 10_000)))

    with capture_logs() as lines:
        async with scripted(Generate=generate) as peer:
            call = peer.stub.Generate(pb.GenerateRequest(request_id="r-1"))
            await call.read()
            call.cancel()
            await eventually(lambda: bool(lines))
    assert [(line["event"], line["code"]) for line in lines] == [("call ended", "CANCELLED")]


async def test_a_call_of_a_request_is_one_line_with_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    async def cancel(request: object, context: object) -> pb.CancelGenerationResponse:
        return pb.CancelGenerationResponse()

    configure_logging("json", "info")
    async with scripted(CancelGeneration=cancel) as peer:
        await peer.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="r-1"))
    (line,) = (json.loads(text) for text in capsys.readouterr().err.splitlines())
    assert (line["event"], line["code"], line["request_id"]) == ("call ended", "OK", "r-1")
    assert line["method"] == "/baton.inference.v1.InferenceService/CancelGeneration"
    assert 0 < line["seconds"] < 5


async def test_an_id_that_the_servicer_chose_is_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def cancel(request: object, context: object) -> pb.CancelGenerationResponse:
        add_log_fields(request_id="chosen")
        return pb.CancelGenerationResponse()

    configure_logging("json", "info")
    async with scripted(CancelGeneration=cancel) as peer:
        await peer.stub.CancelGeneration(pb.CancelGenerationRequest())
    assert json.loads(capsys.readouterr().err)["request_id"] == "chosen"


async def test_the_id_of_a_unary_generation_is_found_inside_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def generate(request: object, context: object) -> pb.GenerateUnaryResponse:
        return pb.GenerateUnaryResponse()

    configure_logging("json", "info")
    async with scripted(GenerateUnary=generate) as peer:
        request = pb.GenerateRequest(request_id="r-1")
        await peer.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
    assert json.loads(capsys.readouterr().err)["request_id"] == "r-1"


async def test_a_call_that_belongs_to_no_request_is_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def get_model(request: object, context: object) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse()

    configure_logging("json", "info")
    async with scripted(GetModel=get_model) as peer:
        await peer.stub.GetModel(model_pb2.GetModelRequest())
    assert capsys.readouterr().err == ""


async def test_a_call_that_fails_is_one_line_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    await failure(GetModel=answering(NoWorker("none is ready")))
    line = json.loads(capsys.readouterr().err)
    assert (line["code"], line["reason"], line["error"]) == ("UNAVAILABLE", "NO_WORKER", "none is ready")


async def test_a_call_whose_deadline_passes_is_logged_as_such() -> None:
    async def get_model(request: object, context: object) -> None:
        await asyncio.Event().wait()

    with capture_logs() as lines:
        async with scripted(GetModel=get_model) as peer:
            await status_of(peer.stub.GetModel(model_pb2.GetModelRequest(), timeout=1))
            await eventually(lambda: bool(lines))
    assert lines[0]["code"] == "DEADLINE_EXCEEDED"


async def test_an_error_of_grpc_that_is_not_of_this_call_leaves_it_with_a_status() -> None:
    async def get_model(request: object, context: object) -> None:
        # gRPC refuses to send this, by an exception of its own.
        await stub.GetModel(model_pb2.GetModelRequest(), metadata=(("x-name", "Jörg"),), timeout=60)

    async with scripted() as elsewhere, scripted(GetModel=get_model) as peer:
        stub = elsewhere.stub
        error = await status_of(peer.stub.GetModel(model_pb2.GetModelRequest(), timeout=60))
    assert (error.code(), error.details()) == (StatusCode.INTERNAL, "internal error")


async def test_a_call_on_a_closed_channel_says_that_its_peer_is_not_there() -> None:
    async def get_model(request: object, context: object) -> None:
        await stub.GetModel(model_pb2.GetModelRequest(), timeout=60)

    async with scripted() as elsewhere:
        stub = elsewhere.stub
    error = await failure(GetModel=get_model)
    assert (error.code(), error.details()) == (StatusCode.UNAVAILABLE, "the channel is closed")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task of Python 3.10 does not know whether it was cancelled")
async def test_a_cancellation_that_is_not_of_this_call_leaves_it_with_a_status() -> None:
    async def get_model(request: object, context: object) -> None:
        other = asyncio.ensure_future(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(other.cancel)
        await other

    async with scripted(GetModel=get_model) as peer:
        error = await status_of(peer.stub.GetModel(model_pb2.GetModelRequest(), timeout=60))
    assert (error.code(), error.details()) == (StatusCode.INTERNAL, "internal error")
