"""One trace over two real servers: calls continue it, however they end."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import SpanKind
from support.recorded_spans import Recorded, recorded
from support.servers.scripted_router import Scripted, scripted

from baton.calls import stream, unary
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2
from rpc.tracing.span import current_span, stage_span
from rpc.tracing.tracer import Tracer

GENERATE = "baton.inference.v1.InferenceService/Generate"
GET_MODEL = "baton.inference.v1.InferenceService/GetModel"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED, UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-01", f"00-{TRACE}-b7ad6b7169203331-00"


class Seen:
    """The metadata with which the inner server was called."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}

    async def get_model(self, request: object, context: aio.ServicerContext) -> model_pb2.GetModelResponse:
        self.metadata = dict(context.invocation_metadata() or ())
        return model_pb2.GetModelResponse()


async def generate_through(inner: Scripted, tracer: Tracer, **call: Any) -> None:
    """Calls a server whose stream calls `inner` within a stage."""

    async def generate(request: object, context: aio.ServicerContext) -> None:
        with stage_span("stage"):
            await unary(inner.stub.GetModel(model_pb2.GetModelRequest()))
        await context.write(pb.GenerateResponse())

    async with scripted(Generate=generate, tracer=tracer) as outer:
        answer = stream(outer.stub.Generate(pb.GenerateRequest(request_id="r-1"), **call))
        assert [response async for response in answer] == [pb.GenerateResponse()]


async def two_servers(outer_settings: dict[str, Any] | None = None, **call: Any) -> tuple[Recorded, Recorded, Seen]:
    """Spans of the outer and of the inner server, and what the inner one saw."""
    seen = Seen()
    async with (
        recorded() as (inner_tracer, inner),
        recorded(**(outer_settings or {})) as (outer_tracer, outer),
        scripted(GetModel=seen.get_model, tracer=inner_tracer) as server,
    ):
        await generate_through(server, outer_tracer, **call)
    return outer, inner, seen


async def test_a_call_that_a_server_makes_is_below_the_stage_that_made_it() -> None:
    outer, inner, _ = await two_servers()
    served, stage, called = outer.named(GENERATE), outer.named("stage"), inner.named(GET_MODEL)
    assert (served.parent, stage.parent.span_id) == (None, served.context.span_id)
    assert (called.parent.span_id, called.context.trace_id) == (stage.context.span_id, served.context.trace_id)


async def test_a_server_span_says_what_was_called_and_for_which_request() -> None:
    outer, _, _ = await two_servers()
    span = outer.named(GENERATE)
    assert span.kind is SpanKind.SERVER
    assert dict(span.attributes) == {
        "rpc.system.name": "grpc",
        "rpc.method": GENERATE,
        "baton.request_id": "r-1",
        "rpc.response.status_code": "OK",
    }


async def test_the_trace_of_the_caller_is_continued() -> None:
    outer, inner, seen = await two_servers(metadata=(("traceparent", SAMPLED), ("tracestate", "vendor=1")))
    assert f"{outer.named(GENERATE).parent.span_id:016x}" == "b7ad6b7169203331"
    assert f"{inner.named(GET_MODEL).context.trace_id:032x}" == TRACE
    assert seen.metadata["tracestate"] == "vendor=1"


async def test_what_the_caller_does_not_sample_is_not_recorded_and_passed_on_as_such() -> None:
    outer, inner, seen = await two_servers(metadata=(("traceparent", UNSAMPLED),))
    assert (outer.spans, inner.spans) == ((), ())
    assert seen.metadata["traceparent"].startswith(f"00-{TRACE}-")
    assert seen.metadata["traceparent"].endswith("-00")


async def test_a_ratio_of_zero_records_nothing_here_or_below() -> None:
    outer, inner, seen = await two_servers({"sample_ratio": 0.0})
    assert (outer.spans, inner.spans) == ((), ())
    assert int(seen.metadata["traceparent"][-2:], 16) & 1 == 0  # the flag "sampled"


async def test_a_caller_that_samples_is_followed_whatever_the_ratio() -> None:
    outer, inner, _ = await two_servers({"sample_ratio": 0.0}, metadata=(("traceparent", SAMPLED),))
    assert (len(outer.spans), len(inner.spans)) == (2, 1)


async def test_a_server_without_tracing_passes_the_trace_on() -> None:
    seen = Seen()
    async with recorded() as (tracer, inner), scripted(GetModel=seen.get_model, tracer=tracer) as server:
        await generate_through(server, Tracer(), metadata=(("traceparent", SAMPLED),))
    assert seen.metadata["traceparent"] == SAMPLED
    assert f"{inner.named(GET_MODEL).parent.span_id:016x}" == "b7ad6b7169203331"


async def test_without_tracing_and_without_a_trace_nothing_is_sent() -> None:
    seen = Seen()
    async with scripted(GetModel=seen.get_model) as server:
        await generate_through(server, Tracer())
    assert "traceparent" not in seen.metadata


async def test_calls_that_belong_to_no_request_begin_no_trace() -> None:
    async with recorded() as (tracer, found), scripted(GetModel=Seen().get_model, tracer=tracer) as server:
        await unary(server.stub.GetModel(model_pb2.GetModelRequest()))
        await health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())
    assert found.spans == ()


async def test_a_traceparent_that_a_call_has_of_its_own_is_left_alone() -> None:
    seen = Seen()

    async def generate(request: object, context: aio.ServicerContext) -> None:
        call = server.stub.GetModel(model_pb2.GetModelRequest(), metadata=(("traceparent", SAMPLED),))
        await unary(call)

    async with (
        scripted(GetModel=seen.get_model) as server,
        recorded() as (tracer, _),
        scripted(Generate=generate, tracer=tracer) as outer,
    ):
        async for _ in outer.stub.Generate(pb.GenerateRequest()):
            pass
    assert seen.metadata["traceparent"] == SAMPLED


@pytest.mark.parametrize("kind", ["writes", "yields"])
async def test_the_span_is_current_in_every_kind_of_servicer(kind: str) -> None:
    within: list[str] = []

    async def writes(request: object, context: aio.ServicerContext) -> None:
        within.append(current_span().trace_id)

    async def yields(request: object, context: object) -> AsyncGenerator[pb.GenerateResponse, None]:
        within.append(current_span().trace_id)
        yield pb.GenerateResponse()

    servicer = {"writes": writes, "yields": yields}[kind]
    async with recorded() as (tracer, found), scripted(Generate=servicer, tracer=tracer) as peer:
        async for _ in peer.stub.Generate(pb.GenerateRequest()):
            pass
    assert within == [f"{found.named(GENERATE).context.trace_id:032x}"]


@pytest.mark.parametrize("state", ["baton=undecided", "other=1,baton=undecided"])
@pytest.mark.parametrize(("ratio", "flags"), [(0.0, "00"), (1.0, "01")])
async def test_a_trace_that_its_caller_did_not_decide_on_is_decided_on_once(
    state: str, ratio: float, flags: str
) -> None:
    sent = (("traceparent", UNSAMPLED), ("tracestate", state))
    outer, inner, seen = await two_servers({"sample_ratio": ratio}, metadata=sent)
    assert (len(outer.spans) > 0, len(inner.spans) > 0) == (ratio > 0, ratio > 0)
    version, trace, span, decision = seen.metadata["traceparent"].split("-")
    assert (version, trace, decision) == ("00", TRACE, flags)
    assert span != UNSAMPLED.split("-")[2]
    assert seen.metadata.get("tracestate", "") == state.removesuffix("baton=undecided").removesuffix(",")
