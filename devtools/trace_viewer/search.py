"""Finding traces: by service, operation, duration, time, and attributes."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from devtools.trace_viewer.store import SpanRecord, Trace, TraceStore

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
