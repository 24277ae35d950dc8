"""The tracer of a process: begins the spans of calls, and flushes them when the process ends."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind

from baton.errors import ConfigError
from baton.version import __version__
from rpc.tracing.exporter import TracingConfig, open_exporter
from rpc.tracing.propagation import is_undecided
from rpc.tracing.recording import Recorder, Sink, random_id
from rpc.tracing.span import NO_SPAN, Span, UnrecordedTrace
from runtime.clock import perf_counter, wall_time_ns
from runtime.threads import start_thread

_SCOPE = "baton"

# How long an aborted export may take to return.
_GIVE_UP_SECONDS = 0.5


class Tracer:
    """Begins spans. Without a sink it records nothing, and only propagates callers' traces."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink

    @property
    def is_on(self) -> bool:
        """True if it records spans."""
        return self._sink is not None

    def begin(self, name: str, parent: SpanContext | None, kind: SpanKind = SpanKind.SERVER) -> Span:
        """The first span in this process of the caller's trace, or of a new one."""
        if self._sink is None:
            return Span(parent) if parent else NO_SPAN
        trace_id = random_id(128) if parent is None else parent.trace_id
        is_ours = parent is None or (is_undecided(parent) and len(parent.trace_state) == 1)
        if is_ours and not self._sink.samples(trace_id):
            return UnrecordedTrace(trace_id)
        now = perf_counter()
        recorder = Recorder(self._sink, wall_time_ns() - int(now * 1e9))
        if parent is not None:
            return Span(*recorder.begin(name, parent, now, kind))
        recording = recorder.first(name, trace_id, now, kind)
        return Span(recording.context, recording)


NO_TRACER = Tracer()


@asynccontextmanager
async def configure_tracing(
    config: TracingConfig, service_name: str, instance_id: str = ""
) -> AsyncGenerator[Tracer, None]:
    """The tracer of this process. Leaving the context exports the remaining spans, within `flush_seconds`.

    OpenTelemetry's global provider is left alone, so that one process may hold several services.
    Raises ConfigError if the endpoint is not `host:port` or TLS files cannot be read.
    """
    if not config.endpoint:
        yield NO_TRACER
        return
    _check(config.endpoint)
    async with recording(config, open_exporter(config), _resource(service_name, instance_id)) as tracer:
        yield tracer


@asynccontextmanager
async def recording(config: TracingConfig, exporter: SpanExporter, resource: Resource) -> AsyncGenerator[Tracer, None]:
    """A tracer that exports its spans in batches, from its own thread."""
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=config.max_queue_spans,
        schedule_delay_millis=config.export_interval_seconds * 1e3,
        max_export_batch_size=min(config.max_batch_spans, config.max_queue_spans),
        export_timeout_millis=config.export_timeout_seconds * 1e3,
    )
    scope = InstrumentationScope(_SCOPE, __version__)
    try:
        sampled_below = TraceIdRatioBased.get_bound_for_rate(config.sample_ratio)
        yield Tracer(Sink(processor, resource, scope, sampled_below))
    finally:
        await asyncio.to_thread(_close, processor, exporter, config.flush_seconds)


def _close(processor: SpanProcessor, exporter: SpanExporter, flush_seconds: float) -> None:
    # The processor itself would wait for up to 30 s; its shutdown takes no timeout.
    flushing = start_thread(processor.shutdown, name="trace-flush")
    flushing.join(flush_seconds)
    if flushing.is_alive():
        exporter.shutdown()
        flushing.join(_GIVE_UP_SECONDS)


def _resource(service_name: str, instance_id: str) -> Resource:
    attributes = {
        "service.name": service_name,
        "service.namespace": "baton",
        "service.version": __version__,
    }
    if instance_id:
        attributes["service.instance.id"] = instance_id
    return Resource.create(attributes)


def _check(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    if not (host and "/" not in endpoint and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"tracing.endpoint: {endpoint!r} is not host:port")
