"""Traces in the JSON of Jaeger's query API, so that Jaeger's clients work here, and Jaeger can replace this viewer."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from devtools.trace_viewer.store import Dependency, Operation, Process, SpanRecord, Trace

Json: TypeAlias = Any  # what json.dumps takes; built and written here, and never read

_KINDS = {
    Span.SPAN_KIND_INTERNAL: "internal",
    Span.SPAN_KIND_SERVER: "server",
    Span.SPAN_KIND_CLIENT: "client",
    Span.SPAN_KIND_PRODUCER: "producer",
    Span.SPAN_KIND_CONSUMER: "consumer",
}
_TYPES = {"string_value": "string", "bool_value": "bool", "int_value": "int64", "double_value": "float64"}


def envelope(data: Json) -> Json:
    """The envelope of every response."""
    total = len(data) if isinstance(data, list) else 0
    return {"data": data, "total": total, "limit": 0, "offset": 0, "errors": None}


def failure(code: int, message: str) -> Json:
    """An error response."""
    return {**envelope(None), "errors": [{"code": code, "msg": message}]}


def trace(found: Trace) -> Json:
    """A trace, with its spans by their start, and the processes that they name."""
    spans = found.spans()
    processes: dict[Process, str] = {}
    for record, _ in spans:
        processes.setdefault(record.process, f"p{len(processes) + 1}")
    return {
        "traceID": found.trace_id.hex(),
        "spans": [_span(record, span, processes[record.process]) for record, span in spans],
        "processes": {name: _process(process) for process, name in processes.items()},
        "warnings": [f"{found.dropped} more spans came and were not kept"] if found.dropped else None,
    }


def operation(known: Operation) -> Json:
    """An operation, with the kind of its spans."""
    return {"name": known.name, "spanKind": _KINDS.get(known.kind, "")}


def dependency(known: Dependency) -> Json:
    """An edge between two services."""
    return {"parent": known.parent, "child": known.child, "callCount": known.calls}


def _span(record: SpanRecord, span: Span, process: str) -> Json:
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    return {
        "traceID": span.trace_id.hex(),
        "spanID": span.span_id.hex(),
        "operationName": span.name,
        "references": list(_references(span)),
        "startTime": start // 1000,
        "duration": max(0, end - start) // 1000,
        "tags": [*_tags(span.attributes), *_facts(record, span)],
        "logs": [_log(event) for event in span.events],
        "processID": process,
        "warnings": None,
    }


def _references(span: Span) -> Iterable[Json]:
    if span.parent_span_id:
        yield {"refType": "CHILD_OF", "traceID": span.trace_id.hex(), "spanID": span.parent_span_id.hex()}
    for link in span.links:
        yield {"refType": "FOLLOWS_FROM", "traceID": link.trace_id.hex(), "spanID": link.span_id.hex()}


def _facts(record: SpanRecord, span: Span) -> Iterable[Json]:
    """The fields of a span that Jaeger shows as tags."""
    if span.kind in _KINDS:
        yield _tag("span.kind", "string", _KINDS[span.kind])
    if record.scope:
        yield _tag("otel.scope.name", "string", record.scope)
    if span.trace_state:
        yield _tag("w3c.tracestate", "string", span.trace_state)
    if span.status.code == Status.STATUS_CODE_OK:
        yield _tag("otel.status_code", "string", "OK")
    if span.status.code == Status.STATUS_CODE_ERROR:
        yield _tag("error", "bool", True)
        yield _tag("otel.status_code", "string", "ERROR")
    if span.status.message:
        yield _tag("otel.status_description", "string", span.status.message)


def _log(event: "Span.Event") -> Json:
    fields = [_tag("event", "string", event.name), *_tags(event.attributes)]
    return {"timestamp": event.time_unix_nano // 1000, "fields": fields}


def _process(process: Process) -> Json:
    others = [each for each in process.attributes if each.key != "service.name"]
    return {"serviceName": process.service, "tags": _tags(others)}


def _tags(attributes: Sequence[KeyValue]) -> list[Json]:
    return [_tag(each.key, _TYPES.get(_kind(each.value), "string"), _value(each.value)) for each in attributes]


def _tag(key: str, kind: str, value: Json) -> Json:
    return {"key": key, "type": kind, "value": value}


def _kind(value: AnyValue) -> str:
    return value.WhichOneof("value") or ""


def _value(value: AnyValue) -> Json:
    """Scalars unchanged; lists and maps as a JSON string, as in Jaeger."""
    kind = _kind(value)
    return getattr(value, kind) if kind in _TYPES else json.dumps(_plain(value))


def _plain(value: AnyValue) -> Json:
    match _kind(value):
        case "array_value":
            return [_plain(each) for each in value.array_value.values]
        case "kvlist_value":
            return {each.key: _plain(each.value) for each in value.kvlist_value.values}
        case "bytes_value":
            return value.bytes_value.hex()
        case "":
            return None
        case kind:
            return getattr(value, kind)
