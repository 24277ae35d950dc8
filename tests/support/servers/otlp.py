"""Spans as exporters send them, and a viewer to send them to."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from devtools.trace_viewer.api import Viewer, open_viewer
from devtools.trace_viewer.store import Bounds
from rpc.channels import open_channel

START_NS = 1_700_000_000_000_000_000
MILLISECOND = 1_000_000

Value = str | bool | int | float | Sequence[str]


@dataclass(frozen=True)
class Made:
    """A span to send; ids are small numbers, times are milliseconds after START_NS."""

    trace: int
    span: int
    parent: int = 0
    name: str = "work"
    service: str = "router"
    start: float = 0
    milliseconds: float = 10
    error: str = ""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: Sequence[tuple[int, int]] = ()
    events: Sequence[tuple[str, Mapping[str, Value]]] = ()
    kind: "Span.SpanKind.ValueType" = Span.SPAN_KIND_INTERNAL


def trace_id(number: int) -> str:
    return f"{number:032x}"


def attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in values.items()]


def resource_spans(*made: Made) -> list[ResourceSpans]:
    """One group a span, as if each came from a process of its own."""
    scope = InstrumentationScope(name="baton", version="1")
    return [
        ResourceSpans(
            resource=Resource(attributes=attributes({"service.name": each.service, "service.instance.id": "i-1"})),
            scope_spans=[ScopeSpans(scope=scope, spans=[_span(each)])],
        )
        for each in made
    ]


async def send(viewer: Viewer, *made: Made) -> None:
    """Exports spans over OTLP/gRPC."""
    async with open_channel(viewer.otlp_address) as channel:
        request = trace_service_pb2.ExportTraceServiceRequest(resource_spans=resource_spans(*made))
        await trace_service_pb2_grpc.TraceServiceStub(channel).Export(request)


@asynccontextmanager
async def viewing(*made: Made, bounds: Bounds | None = None) -> AsyncIterator[Viewer]:
    """A viewer that has received these spans."""
    async with open_viewer("127.0.0.1:0", "127.0.0.1:0", bounds or Bounds()) as viewer:
        if made:
            await send(viewer, *made)
        yield viewer


def _span(made: Made) -> Span:
    start = START_NS + int(made.start * MILLISECOND)
    return Span(
        trace_id=made.trace.to_bytes(16, "big"),
        span_id=made.span.to_bytes(8, "big"),
        parent_span_id=made.parent.to_bytes(8, "big") if made.parent else b"",
        name=made.name,
        kind=made.kind,
        start_time_unix_nano=start,
        end_time_unix_nano=start + int(made.milliseconds * MILLISECOND),
        attributes=attributes(made.attributes),
        status=Status(code=Status.STATUS_CODE_ERROR, message=made.error) if made.error else None,
        links=[Span.Link(trace_id=t.to_bytes(16, "big"), span_id=s.to_bytes(8, "big")) for t, s in made.links],
        events=[
            Span.Event(name=name, time_unix_nano=start, attributes=attributes(values)) for name, values in made.events
        ],
    )


def _value(value: Value) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case _:
            return AnyValue(array_value=ArrayValue(values=[_value(each) for each in value]))
