"""Keeps the newest traces in bounded memory; the oldest are dropped first."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

# The memory that a span needs besides its bytes: the object, its place in a list, its share of a trace.
_OVERHEAD_BYTES = 200
_MOST_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of what is kept. `max_bytes` counts the spans and the overhead of keeping them."""

    max_traces: int = 10_000
    max_spans_per_trace: int = 2_000
    max_bytes: int = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """A process that records spans. All its spans share one object."""

    service: str
    attributes: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span as received, still serialized, with its process and instrumentation library."""

    process: Process
    scope: str
    wire: bytes

    def parse(self) -> Span:
        """The span as a message."""
        return Span.FromString(self.wire)


@dataclass(frozen=True, slots=True)
class Operation:
    """The name and kind of a service's spans."""

    name: str
    kind: "Span.SpanKind.ValueType"


class Trace:
    """The spans of one trace, in the order in which they came. `dropped` counts those beyond the bound."""

    __slots__ = ("dropped", "num_bytes", "records", "start_ns", "trace_id")

    def __init__(self, trace_id: bytes) -> None:
        self.trace_id = trace_id
        self.records: list[SpanRecord] = []
        self.start_ns = 2**63
        self.num_bytes = 0
        self.dropped = 0

    def spans(self) -> list[tuple[SpanRecord, Span]]:
        """All spans, each once: an exporter sends again if it got no response."""
        parsed = {span.span_id: (record, span) for record in self.records for span in (record.parse(),)}
        return sorted(parsed.values(), key=lambda pair: pair[1].start_time_unix_nano)


class TraceStore:
    """Traces by id. Use it from one event loop."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._traces: OrderedDict[bytes, Trace] = OrderedDict()
        self._processes: dict[bytes, Process] = {}
        self._operations: dict[str, dict[Operation, None]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._traces)

    @property
    def num_bytes(self) -> int:
        """The size of what is kept, as the bound counts it."""
        return self._num_bytes

    @property
    def services(self) -> list[str]:
        """The names of all services that have recorded spans, sorted."""
        return sorted(self._operations)

    def operations(self, service: str) -> list[Operation]:
        """The operations of a service, sorted by name."""
        return sorted(self._operations.get(service, ()), key=lambda operation: operation.name)

    def find(self, trace_id: bytes) -> Trace | None:
        """The trace of that id, if it is still here."""
        return self._traces.get(trace_id)

    def newest_first(self) -> Iterator[Trace]:
        """All traces, the newest first. Traces may be added or dropped meanwhile."""
        return iter(sorted(self._traces.values(), key=lambda trace: trace.start_ns, reverse=True))

    def add(self, groups: Iterable[ResourceSpans]) -> None:
        """Adds spans as received by OTLP, and drops old traces to make room."""
        for group in groups:
            process = self._process(group.resource)
            for scoped in group.scope_spans:
                self._add(process, " ".join((scoped.scope.name, scoped.scope.version)).strip(), scoped.spans)
        self._drop_oldest()

    def _add(self, process: Process, scope: str, spans: Sequence[Span]) -> None:
        for span in spans:
            trace = self._traces.get(span.trace_id)
            if trace is None:
                trace = self._traces[span.trace_id] = Trace(span.trace_id)
            if len(trace.records) >= self._bounds.max_spans_per_trace:
                trace.dropped += 1
                continue
            self._record_operation(process.service, Operation(span.name, span.kind))
            record = SpanRecord(process, scope, span.SerializeToString())
            trace.records.append(record)
            trace.start_ns = min(trace.start_ns, span.start_time_unix_nano)
            size = len(record.wire) + _OVERHEAD_BYTES
            trace.num_bytes += size
            self._num_bytes += size

    def _drop_oldest(self) -> None:
        bounds = self._bounds
        while len(self._traces) > bounds.max_traces or self._num_bytes > bounds.max_bytes:
            _, oldest = self._traces.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _process(self, resource: Resource) -> Process:
        key = resource.SerializeToString(deterministic=True)
        known = self._processes.get(key)
        if known is None:
            if len(self._processes) >= _MOST_NAMES:
                self._processes.clear()
            known = self._processes[key] = Process(_service_name(resource), tuple(resource.attributes))
        return known

    def _record_operation(self, service: str, operation: Operation) -> None:
        known = self._operations.setdefault(service, {})
        if len(known) < _MOST_NAMES:
            known[operation] = None


def _service_name(resource: Resource) -> str:
    names = [each.value.string_value for each in resource.attributes if each.key == "service.name"]
    return names[0] if names and names[0] else "unknown_service"
