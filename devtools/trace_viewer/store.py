"""Keeps the newest traces in bounded memory; the oldest are dropped first.

Finding traces: by service, operation, duration, time, and attributes.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

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


# Spans are parsed while they are searched; after this many the loop may do something else.
_TRACES_A_TURN = 200


@dataclass(frozen=True, slots=True)
class Query:
    """Conditions that one span of a trace must meet. Empty and zero match all; times are Unix nanoseconds."""

    service: str = ""
    operation: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    min_duration_ns: int = 0
    max_duration_ns: int = 2**63
    start_ns: int = 0
    end_ns: int = 2**63
    limit: int = 20


@dataclass(frozen=True, slots=True)
class Dependency:
    """The number of calls from one service to another."""

    parent: str
    child: str
    calls: int


async def search(store: TraceStore, query: Query) -> list[Trace]:
    """The newest traces that match, at most `query.limit`."""
    found: list[Trace] = []
    for number, trace in enumerate(store.newest_first()):
        if len(found) >= query.limit:
            break
        if any(_matches(record, query) for record in trace.records):
            found.append(trace)
        await _let_others_run(number)
    return found


async def dependencies(store: TraceStore) -> list[Dependency]:
    """The calls between services, from spans whose parent belongs to another service."""
    calls: Counter[tuple[str, str]] = Counter()
    for number, trace in enumerate(store.newest_first()):
        spans = trace.spans()
        services = {span.span_id: record.process.service for record, span in spans}
        for record, span in spans:
            parent = services.get(span.parent_span_id, record.process.service)
            if parent != record.process.service:
                calls[parent, record.process.service] += 1
        await _let_others_run(number)
    return [Dependency(parent, child, count) for (parent, child), count in sorted(calls.items())]


def _matches(record: SpanRecord, query: Query) -> bool:
    if query.service and record.process.service != query.service:
        return False
    span = record.parse()
    duration = span.end_time_unix_nano - span.start_time_unix_nano
    return (
        query.operation in ("", span.name)
        and query.min_duration_ns <= duration <= query.max_duration_ns
        and query.start_ns <= span.start_time_unix_nano <= query.end_ns
        and all(_has_tag(key, value, span, record) for key, value in query.tags.items())
    )


def _has_tag(key: str, value: str, span: Span, record: SpanRecord) -> bool:
    if key == "error":
        return (span.status.code == Status.STATUS_CODE_ERROR) == (value == "true")
    return (
        _has(span.attributes, key, value)
        or _has(record.process.attributes, key, value)
        or any(_has(event.attributes, key, value) for event in span.events)
    )


def _has(attributes: Sequence[KeyValue], key: str, value: str) -> bool:
    return any(each.key == key and text(each.value) == value for each in attributes)


def text(value: AnyValue) -> str:
    """A value as it is written in a search."""
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return "true" if value.bool_value else "false"
        case "int_value":
            return str(value.int_value)
        case "double_value":
            return f"{value.double_value:g}"
        case _:
            return ""


async def _let_others_run(number: int) -> None:
    if number % _TRACES_A_TURN == _TRACES_A_TURN - 1:
        await asyncio.sleep(0)


def since(seconds: float) -> int:
    """The Unix time that long ago, in nanoseconds."""
    return time.time_ns() - int(seconds * 1e9)
