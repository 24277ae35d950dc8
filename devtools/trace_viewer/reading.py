"""Reads traces from Jaeger's query API: of `baton traces`, or of Jaeger.

Traces in the JSON of Jaeger's query API, so that Jaeger's clients work here, and Jaeger can replace this viewer.
"""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from baton.errors import InvalidRequest, RequestNotFound, Unavailable
from devtools.trace_viewer.store import Dependency, Operation, Process, SpanRecord, Trace

_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A span. `links` are the ids of linked spans; times are Unix microseconds."""

    span_id: str
    parent_id: str
    name: str
    service: str
    start: int
    duration: int
    attributes: Mapping[str, Any]
    events: Sequence[str]
    links: Sequence[str]

    @property
    def is_error(self) -> bool:
        """True if its status is ERROR."""
        return self.attributes.get("error") is True

    @property
    def outcome(self) -> str:
        """The outcome: OK, CANCELLED, or the reason of an error."""
        return str(self.attributes.get("baton.outcome", "OK"))

    @property
    def is_cancelled(self) -> bool:
        """True if it was cancelled."""
        return self.outcome == "CANCELLED"


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """A trace, its spans in the order of their start."""

    trace_id: str
    spans: Sequence[ReadSpan]

    def named(self, *names: str) -> list[ReadSpan]:
        """The spans of these names; those of RPCs without their packages, such as DecodeService/Decode."""
        ends = tuple(f".{name}" for name in names if "/" in name)
        return [span for span in self.spans if span.name in names or span.name.endswith(ends)]

    def below(self, span: ReadSpan, name: str = "") -> list[ReadSpan]:
        """The children of a span, all or those of a name (see `named`)."""
        children = [one for one in self.spans if one.parent_id == span.span_id]
        return ReadTrace(self.trace_id, children).named(name) if name else children

    def find(self, span_id: str) -> ReadSpan | None:
        """The span of that id."""
        return next((span for span in self.spans if span.span_id == span_id), None)


async def fetch(url: str, trace_id: str) -> ReadTrace:
    """The trace of that id at `url`, such as http://127.0.0.1:16686.

    Raises RequestNotFound if it is not there (yet), InvalidRequest if that is no id, Unavailable without an answer.
    """
    answer = await asyncio.to_thread(_get, f"{url}/api/traces/{trace_id}")
    return read(answer["data"][0])


def read(trace: Mapping[str, Any]) -> ReadTrace:
    """A trace of Jaeger's JSON."""
    services = {key: process["serviceName"] for key, process in trace["processes"].items()}
    spans = [_read_span(span, services[span["processID"]]) for span in trace["spans"]]
    return ReadTrace(trace["traceID"], sorted(spans, key=lambda span: span.start))


def _read_span(span: Mapping[str, Any], service: str) -> ReadSpan:
    references = span["references"]
    return ReadSpan(
        span_id=span["spanID"],
        parent_id=next((one["spanID"] for one in references if one["refType"] == "CHILD_OF"), ""),
        name=span["operationName"],
        service=service,
        start=span["startTime"],
        duration=span["duration"],
        attributes={tag["key"]: tag["value"] for tag in span["tags"]},
        events=list(_events(span["logs"])),
        links=[one["spanID"] for one in references if one["refType"] == "FOLLOWS_FROM"],
    )


def _events(logs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for log in logs:
        yield from (str(field["value"]) for field in log["fields"] if field["key"] == "event")


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        message = f"{url}: {error.reason}"
        raise RequestNotFound(message) if error.code == 404 else InvalidRequest.of("TRACE_ID", message) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url}: {error}") from None


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
