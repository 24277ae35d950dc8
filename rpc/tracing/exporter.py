"""Span export over OTLP, with one log line when it starts to fail and one when it works again. The key `tracing`.

Spans as OTLP's messages, filled in place.

The library's encoder makes each part by itself and gives it to the next larger one, which copies it, and hashes the
resource of each span: that takes five times as long.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from pydantic import Field, SecretStr

from rpc.auth.tls import TlsConfig
from runtime.config import Section

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


class TracingConfig(Section):
    """The key `tracing`. Without an endpoint nothing is recorded, but callers' trace contexts are propagated."""

    endpoint: str = Field(default="", description="host:port of an OTLP/gRPC receiver, such as 127.0.0.1:4317.")
    sample_ratio: float = Field(default=1.0, ge=0, le=1, description="Of traces that begin here; callers decide else.")
    headers: dict[str, SecretStr] = Field(default={}, description="Sent with every export, such as authorization.")
    tls: TlsConfig | None = Field(default=None, description="Unset exports in plain text.")
    export_interval_seconds: float = Field(default=1.0, gt=0)
    export_timeout_seconds: float = Field(default=5.0, gt=0)
    max_queue_spans: int = Field(default=4096, ge=1, description="Spans that wait to be exported; more are dropped.")
    max_batch_spans: int = Field(default=512, ge=1)
    flush_seconds: float = Field(default=3.0, ge=0, description="How long the end of the process waits for exports.")


log = structlog.get_logger(__name__)

# These loggers report every attempt, retry and dropped span: thousands of lines while a receiver is away.
_NOISY = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal")


class QuietExporter(SpanExporter):
    """An exporter that logs when its receiver is lost and found again. Called by one thread at a time."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._lost = 0
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans. Those that cannot be sent are dropped, and counted."""
        result = self._exporter.export(spans)
        with self._lock:
            if result is SpanExportResult.SUCCESS:
                self._record_success()
            else:
                self._record_failure(len(spans))
        return result

    def shutdown(self, timeout_millis: float = 3_000) -> None:
        """Stops; spans that are not sent yet are lost."""
        if isinstance(self._exporter, OTLPSpanExporter):
            self._exporter.shutdown(timeout_millis=timeout_millis)
        else:
            self._exporter.shutdown()

    def _record_success(self) -> None:
        if self._lost:
            log.info("spans are exported again", endpoint=self._endpoint, lost=self._lost)
        self._lost = 0

    def _record_failure(self, count: int) -> None:
        if not self._lost:
            log.warning("spans cannot be exported", endpoint=self._endpoint)
        self._lost += count


def silence_library_logs() -> None:
    """Silences the exporter's own loggers; QuietExporter logs a failure once."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def open_exporter(config: TracingConfig) -> QuietExporter:
    """An exporter to `config.endpoint`. Connects when first used. Raises ConfigError if TLS files cannot be read."""
    silence_library_logs()
    headers = [(key.lower(), value.get_secret_value()) for key, value in config.headers.items()]
    exporter = InPlaceExporter(
        # With a scheme, so that neither the library nor an environment variable guesses one.
        endpoint=f"{'https' if config.tls else 'http'}://{config.endpoint}",
        insecure=config.tls is None,
        credentials=config.tls.channel_credentials() if config.tls else None,
        headers=headers,
        timeout=config.export_timeout_seconds,
    )
    return QuietExporter(exporter, config.endpoint)
