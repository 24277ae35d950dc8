"""The outcome of a call in spans."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from grpc import StatusCode, aio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode as SpanStatus
from support.eventually import eventually
from support.recorded_spans import recorded
from support.servers.scripted_router import scripted, status_of

from baton.errors import BatonError, Cancelled, HandoffLost, InvalidRequest, NoWorker, Overloaded, Unsupported
from baton.inference.v1 import generate_pb2 as pb
from rpc.tracing.span import optional_attempt, stage_span
from runtime.aio import TaskGroup
from runtime.telemetry.logs import configure_logging

Servicer = Callable[[pb.GenerateRequest, Any], Any]


def raising(error: BaseException) -> Servicer:
    async def generate(request: object, context: aio.ServicerContext) -> None:
        await context.write(pb.GenerateResponse())
        raise error

    return generate


async def span_of(servicer: Servicer, timeout: float | None = None) -> ReadableSpan:
    """The server's span of a call that fails."""
    async with recorded() as (tracer, found), scripted(Generate=servicer, tracer=tracer) as peer:
        await status_of(peer.stub.Generate(pb.GenerateRequest(request_id="r-1"), timeout=timeout))
    return found.named("Generate")


async def flooding(request: object, context: aio.ServicerContext) -> None:
    """Writes until flow control blocks it."""
    while True:
        await context.write(pb.GenerateResponse(token=pb.TokenDelta(text="x" * 10_000)))


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (HandoffLost("h-1 is gone"), "HANDOFF_LOST", "ABORTED"),
        (NoWorker("none is ready"), "NO_WORKER", "UNAVAILABLE"),
        (InvalidRequest.of("prompt", "is empty"), "INVALID_REQUEST", "INVALID_ARGUMENT"),
    ],
)
async def test_an_error_is_the_status_of_the_span(error: BatonError, reason: str, code: str) -> None:
    span = await span_of(raising(error))
    assert (span.status.status_code, span.status.description) == (SpanStatus.ERROR, error.message)
    assert (span.attributes["error.type"], span.attributes["baton.outcome"]) == (reason, reason)
    assert span.attributes["rpc.response.status_code"] == code


async def test_an_error_is_an_event_without_a_stack() -> None:
    (event,) = (await span_of(raising(HandoffLost("h-1 is gone")))).events
    assert event.name == "exception"
    assert dict(event.attributes) == {"exception.type": "HandoffLost", "exception.message": "h-1 is gone"}


async def test_an_error_says_where_it_happened() -> None:
    span = await span_of(raising(NoWorker("none", stage="decode", worker_id="d-0")))
    assert (span.attributes["baton.error.stage"], span.attributes["baton.error.worker_id"]) == ("decode", "d-0")


async def test_an_unexpected_error_is_internal_and_has_its_stack() -> None:
    span = await span_of(raising(ZeroDivisionError("by zero")))
    assert (span.status.status_code, span.status.description) == (SpanStatus.ERROR, "internal error")
    assert span.attributes["error.type"] == "ZeroDivisionError"
    assert "tests/rpc/tracing/test_outcomes.py" in span.events[0].attributes["exception.stacktrace"]


async def test_an_error_that_a_task_group_wrapped_keeps_its_reason() -> None:
    async def generate(request: object, context: aio.ServicerContext) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(raising(NoWorker("none is ready"))(pb.GenerateRequest(), context))

    assert (await span_of(generate)).attributes["error.type"] == "NO_WORKER"


async def test_a_status_that_a_servicer_aborted_with_is_on_the_span() -> None:
    async def generate(request: object, context: aio.ServicerContext) -> None:
        await context.abort(StatusCode.DATA_LOSS, "as I said")

    span = await span_of(generate)
    assert (span.attributes["rpc.response.status_code"], span.status.status_code) == ("DATA_LOSS", SpanStatus.ERROR)


async def test_a_deadline_that_passed_is_an_error() -> None:
    span = await span_of(flooding, timeout=1.0)
    assert span.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert (span.status.status_code, span.attributes["error.type"]) == (SpanStatus.ERROR, "DEADLINE_EXCEEDED")


async def test_a_request_that_was_stopped_is_cancelled_and_no_error() -> None:
    span = await span_of(raising(Cancelled("cancelled by CancelGeneration")))
    assert span.status.status_code is SpanStatus.UNSET
    assert span.attributes["baton.outcome"] == span.attributes["rpc.response.status_code"] == "CANCELLED"
    assert [(event.name, event.attributes["baton.reason"]) for event in span.events] == [
        ("cancelled", "cancelled by CancelGeneration")
    ]


@pytest.mark.parametrize(
    "error",
    [Overloaded("no room", retry_after_seconds=1.0), HandoffLost("h-1 is gone"), Unsupported("no early reads")],
    ids=lambda error: error.reason,
)
async def test_what_refuses_an_optional_attempt_is_no_error(error: BatonError) -> None:
    span = await span_of(attempting(error))
    assert (span.status.status_code, span.attributes["baton.refused"]) == (SpanStatus.UNSET, error.reason)
    assert span.attributes.keys().isdisjoint({"baton.outcome", "error.type"})
    assert [(event.name, dict(event.attributes)) for event in span.events] == [
        ("refused", {"baton.reason": error.message})
    ]


@pytest.mark.parametrize("error", [NoWorker("none is ready"), InvalidRequest.of("prompt", "is empty"), ValueError()])
async def test_a_fault_in_an_optional_attempt_is_an_error(error: Exception) -> None:
    span = await span_of(attempting(error))
    assert span.status.status_code is SpanStatus.ERROR
    assert "baton.refused" not in span.attributes


def attempting(error: Exception) -> Servicer:
    async def generate(request: object, context: aio.ServicerContext) -> None:
        with optional_attempt():
            raise error

    return generate


async def test_a_client_that_leaves_during_a_write_is_a_cancel_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    async def generate(request: object, context: aio.ServicerContext) -> None:
        with stage_span("decode"):
            await flooding(request, context)

    async with recorded() as (tracer, found), scripted(Generate=generate, tracer=tracer) as peer:
        call = peer.stub.Generate(pb.GenerateRequest())
        await call.read()
        await asyncio.sleep(0.05)  # lets flow control block the servicer in a write
        call.cancel()
    for name in ("Generate", "decode"):
        span = found.named(name)
        assert (span.status.status_code, span.attributes["baton.outcome"]) == (SpanStatus.UNSET, "CANCELLED")
    # gRPC itself may complain that it could not write.
    ours = [record for record in caplog.records if not record.name.startswith("grpc.")]
    assert not [record for record in ours if "detach" in record.message or record.levelno >= logging.WARNING]


async def test_a_malformed_request_has_a_span_too() -> None:
    async with recorded() as (tracer, found), scripted(tracer=tracer) as peer:
        call = peer.channel.unary_unary("/baton.inference.v1.InferenceService/GetModel")
        traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await status_of(call(b"\x0a\xff", metadata=(("traceparent", traceparent),)))
    assert found.named("GetModel").attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"


async def test_the_trace_id_is_on_the_line_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    span = await span_of(raising(NoWorker("none is ready")))
    line = json.loads(capsys.readouterr().err)
    assert line["trace_id"] == f"{span.context.trace_id:032x}"


async def test_a_stage_that_failed_says_so_and_the_next_one_does_not() -> None:
    async def generate(request: object, context: aio.ServicerContext) -> None:
        try:
            with stage_span("prefill"):
                raise NoWorker("p-0 is gone")
        except NoWorker:
            pass
        with stage_span("decode"):
            await context.write(pb.GenerateResponse())

    async with recorded() as (tracer, found), scripted(Generate=generate, tracer=tracer) as peer:
        async for _ in peer.stub.Generate(pb.GenerateRequest()):
            pass
    assert found.named("prefill").status.status_code is SpanStatus.ERROR
    assert found.named("decode").status.status_code is SpanStatus.UNSET
    assert "baton.outcome" not in found.named("Generate").attributes


async def test_every_task_of_a_call_is_in_its_span() -> None:
    async def generate(request: object, context: aio.ServicerContext) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(staged("one"))
            tasks.create_task(staged("two"))

    async def staged(name: str) -> None:
        with stage_span(name):
            await asyncio.sleep(0.01)

    async with recorded() as (tracer, found), scripted(Generate=generate, tracer=tracer) as peer:
        await eventually(lambda: True)
        async for _ in peer.stub.Generate(pb.GenerateRequest()):
            pass
    served = found.named("Generate").context.span_id
    assert {found.named("one").parent.span_id, found.named("two").parent.span_id} == {served}
