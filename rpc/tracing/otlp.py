"""Spans as OTLP's messages, filled in place.

The library's encoder makes each part by itself and gives it to the next larger one, which copies it, and hashes the
resource of each span: that takes five times as long.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

_KINDS = {
    SpanKind.INTERNAL: trace_pb2.Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: trace_pb2.Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: trace_pb2.Span.SPAN_KIND_CLIENT,
    SpanKind.PRODUCER: trace_pb2.Span.SPAN_KIND_PRODUCER,
    SpanKind.CONSUMER: trace_pb2.Span.SPAN_KIND_CONSUMER,
}
_CODES = {
    StatusCode.UNSET: trace_pb2.Status.STATUS_CODE_UNSET,
    StatusCode.OK: trace_pb2.Status.STATUS_CODE_OK,
    StatusCode.ERROR: trace_pb2.Status.STATUS_CODE_ERROR,
}
_HERE = trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _HERE | trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class InPlaceExporter(OTLPSpanExporter):
    """The library's exporter, but for how it makes its messages. All spans must have one resource and scope."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return export_request(data)


def export_request(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """The request that exports these spans, which have the resource and scope of the first one."""
    request = ExportTraceServiceRequest()
    resource, scope = spans[0].resource, spans[0].instrumentation_scope
    of_resource = request.resource_spans.add(schema_url=resource.schema_url)
    _fill_attributes(of_resource.resource.attributes.add, resource.attributes)
    of_scope = of_resource.scope_spans.add()
    if scope is not None:
        of_scope.scope.name, of_scope.scope.version = scope.name, scope.version or ""
        of_scope.schema_url = scope.schema_url or ""
    add = of_scope.spans.add
    for span in spans:
        _fill_span(add(), span)
    return request


def _fill_span(message: trace_pb2.Span, span: ReadableSpan) -> None:
    context, parent = span.context, span.parent
    assert context is not None
    message.trace_id, message.span_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
    if context.trace_state:
        message.trace_state = context.trace_state.to_header()
    if parent is not None:
        message.parent_span_id = parent.span_id.to_bytes(8, "big")
    message.flags = _flags(parent)
    message.name, message.kind = span.name, _KINDS[span.kind]
    message.start_time_unix_nano, message.end_time_unix_nano = span.start_time or 0, span.end_time or 0
    _fill_attributes(message.attributes.add, span.attributes)
    for event in span.events:
        noted = message.events.add(name=event.name, time_unix_nano=event.timestamp)
        _fill_attributes(noted.attributes.add, event.attributes)
    for link in span.links:
        linked = message.links.add(flags=_flags(link.context))
        linked.trace_id = link.context.trace_id.to_bytes(16, "big")
        linked.span_id = link.context.span_id.to_bytes(8, "big")
        _fill_attributes(linked.attributes.add, link.attributes)
    message.status.code = _CODES[span.status.status_code]
    if span.status.description:
        message.status.message = span.status.description


def _flags(context: SpanContext | None) -> int:
    return _REMOTE if context is not None and context.is_remote else _HERE


def _fill_attributes(add: Callable[[], KeyValue], attributes: Mapping[str, Any] | None) -> None:
    for name, value in (attributes or {}).items():
        attribute = add()
        attribute.key = name
        try:
            _fill_value(attribute.value, value)
        except ValueError:
            # Half of a surrogate pair, or a number over 64 bits: one attribute without a value, and no batch is lost.
            attribute.value.Clear()


def _fill_value(message: AnyValue, value: Any) -> None:
    if isinstance(value, str):
        message.string_value = value
    elif isinstance(value, bool):
        message.bool_value = value
    elif isinstance(value, int):
        message.int_value = value
    elif isinstance(value, float):
        message.double_value = value
    else:
        values = message.array_value.values
        for each in value:
            _fill_value(values.add(), each)
