"""A trace begins in the client: with its span, where OpenTelemetry is configured, else with its trace context alone."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.cluster.in_process import DECODE, PREFILL
from support.cluster.traced import traced
from support.recorded_spans import recorded
from support.servers.scripted_router import scripted

from baton import AsyncClient, Client
from baton.errors import InvalidRequest, NoWorker, Unavailable
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2

ROOT = Path(__file__).resolve().parents[2]
GENERATE = "baton.inference.v1.InferenceService/Generate"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


async def test_the_routers_trace_is_below_the_clients_span(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    async with traced(PREFILL, DECODE) as cluster:
        async with AsyncClient(cluster.running.address, tracer_provider=provider) as client:
            await client.generate("hello", max_tokens=2).text()
        verdict = await cluster.verdict()
        (served,) = [span for span in cluster.trace().spans if span.name == GENERATE]
    span = only(exporter)
    assert (span.name, span.kind, span.parent) == (GENERATE, SpanKind.CLIENT, None)
    assert served.parent_id == f"{span.context.span_id:016x}"
    assert span.attributes is not None
    assert span.attributes["baton.request_id"]
    assert span.attributes["rpc.response.status_code"] == "OK"
    assert (verdict.outcome, verdict.faults) == ("ok", ())


async def test_a_call_is_below_the_span_that_it_is_made_in(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    tracer = provider.get_tracer("test")
    with (
        tracer.start_as_current_span("work") as work,
        Client("127.0.0.1:1", tracer_provider=provider) as client,
        pytest.raises(Unavailable),
    ):
        client.models()
    called, _ = exporter.get_finished_spans()
    assert called.parent is not None
    assert called.parent.span_id == work.get_span_context().span_id


async def test_a_refused_call_is_a_span_with_the_reason(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    async def refuse(request: object, context: object) -> model_pb2.ListModelsResponse:
        raise NoWorker("none is ready", stage="route")

    async with (
        scripted(ListModels=refuse) as server,
        AsyncClient(server.server.address, tracer_provider=provider) as client,
    ):
        with pytest.raises(NoWorker):
            await client.models()
    span = only(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert (
        dict(span.attributes or {}).items()
        >= {
            "baton.outcome": "NO_WORKER",
            "error.type": "NO_WORKER",
            "baton.error.stage": "route",
            "rpc.response.status_code": "UNAVAILABLE",
        }.items()
    )
    assert [event.name for event in span.events] == ["exception"]


async def test_leaving_a_stream_is_a_cancel_and_no_error(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    async def generate(request: object, context: object) -> object:
        for number in range(10_000):
            yield pb.GenerateResponse(request_id="r", sequence=number)
            await asyncio.sleep(0.001)

    async with (
        scripted(Generate=generate) as server,
        AsyncClient(server.server.address, tracer_provider=provider) as client,
        aclosing(client.generate("hello")) as events,
    ):
        await anext(events)
    span = only(exporter)
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}).items() >= {"baton.outcome": "CANCELLED", "baton.request_id": "r"}.items()
    assert [event.name for event in span.events] == ["cancelled"]


async def test_without_a_provider_the_router_decides_and_continues_the_trace_of_the_client() -> None:
    async with traced(PREFILL, DECODE) as cluster:
        async with AsyncClient(cluster.running.address) as client:
            answer = client.generate("hello", max_tokens=2)
            await answer.text()
        verdict = await cluster.verdict()
        trace = cluster.trace()
    assert (verdict.outcome, verdict.faults) == ("ok", ())
    assert trace.trace_id == answer.trace_id


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 0), (1.0, 1)])
async def test_without_a_provider_the_routers_ratio_holds(ratio: float, expected: int) -> None:
    async def generate(request: object, context: object) -> object:
        yield pb.GenerateResponse(request_id="r")

    async with (
        recorded(sample_ratio=ratio) as (tracer, found),
        scripted(Generate=generate, tracer=tracer) as server,
        AsyncClient(server.server.address) as client,
    ):
        await client.generate(pb.GenerateRequest(request_id="r", prompt="hello")).text()
    assert len(found.spans) == expected


async def test_the_decision_of_the_first_server_holds_for_the_next_one() -> None:
    seen: dict[str, str] = {}

    async def inner(request: object, context: object) -> model_pb2.GetModelResponse:
        seen.update(context.invocation_metadata() or ())  # type: ignore[attr-defined]
        return model_pb2.GetModelResponse()

    async with recorded() as (tracer, _), scripted(GetModel=inner) as server:

        async def outer(request: object, context: object) -> object:
            await server.stub.GetModel(model_pb2.GetModelRequest())
            yield pb.GenerateResponse(request_id="r")

        async with scripted(Generate=outer, tracer=tracer) as first, AsyncClient(first.server.address) as client:
            await client.generate(pb.GenerateRequest(request_id="r", prompt="hello")).text()
    assert seen["traceparent"].endswith("-01")
    assert "tracestate" not in seen


async def test_calls_that_belong_to_no_request_begin_no_trace() -> None:
    async def models(request: object, context: object) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse()

    async with (
        recorded() as (tracer, found),
        scripted(ListModels=models, tracer=tracer) as server,
        AsyncClient(server.server.address) as client,
    ):
        await client.models()
    assert found.spans == ()


def test_without_opentelemetry_a_call_still_carries_a_trace() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from baton.connection.tracing import begin\n"
        "with begin('a.B/C', 'host:1') as trace: print(dict(trace.metadata), trace.trace_id)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "'tracestate': 'baton=undecided'" in done.stdout
    assert done.stdout.split("'")[3].split("-")[1] == done.stdout.split()[-1]


async def test_a_bad_prompt_raises_the_same_error_with_a_provider(provider: TracerProvider) -> None:
    async with (
        traced(PREFILL, DECODE) as cluster,
        AsyncClient(cluster.running.address, tracer_provider=provider) as client,
    ):
        with pytest.raises(InvalidRequest):
            await client.generate("").text()
