"""The viewer's HTTP API: Jaeger's query API, and the page.

The whole viewer: OTLP in, Jaeger's API and the page out, over one store.
"""

import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import unquote

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from devtools.trace_viewer import reading
from devtools.trace_viewer.http import HttpAnswer, RequestTarget, serve_http
from devtools.trace_viewer.store import Bounds, Query, TraceStore, dependencies, search, since
from rpc.health import Health
from rpc.server import Service, serve

_MOST_TRACES = 1500
_DEFAULT_TRACES = 100
_NANOSECONDS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(ns|us|µs|ms|s|m|h)")

_PAGE_HEADERS = {
    # The page is one file; the browser must load or send nothing else, whatever a span contains.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "content-type": "text/html; charset=utf-8",
}


class _Wrong(ValueError):
    """A wrong parameter; the message names it."""


class TraceApi:
    """Answers requests from a store."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def answer(self, target: RequestTarget) -> HttpAnswer:
        """The response to a GET of `target`; 404 for unknown paths."""
        parts = [unquote(part) for part in target.path.strip("/").split("/")]
        try:
            return await self._route(parts, target.query)
        except _Wrong as error:
            return _json(reading.failure(400, str(error)), 400)

    async def _route(self, parts: list[str], query: Mapping[str, list[str]]) -> HttpAnswer:
        match parts:
            case [""] | ["search"] | ["trace", _]:
                return HttpAnswer(200, page(), _PAGE_HEADERS)
            case ["api", "services"]:
                return _json(reading.envelope(self._store.services))
            case ["api", "services", service, "operations"]:
                return _json(reading.envelope(sorted({each.name for each in self._store.operations(service)})))
            case ["api", "operations"]:
                return self._operations(_one(query, "service"), _one(query, "spanKind"))
            case ["api", "traces"]:
                return await self._traces(query)
            case ["api", "traces", trace_id]:
                return self._trace(trace_id)
            case ["api", "dependencies"]:
                edges = await dependencies(self._store)
                return _json(reading.envelope([reading.dependency(edge) for edge in edges]))
            case _:
                return _json(reading.failure(404, "nothing is served at this path"), 404)

    def _operations(self, service: str, kind: str) -> HttpAnswer:
        if not service:
            raise _Wrong("parameter 'service' is required")
        found = [reading.operation(each) for each in self._store.operations(service)]
        return _json(reading.envelope([each for each in found if kind in ("", each["spanKind"])]))

    async def _traces(self, query: Mapping[str, list[str]]) -> HttpAnswer:
        if query.get("traceID"):
            ids = [_trace_id(text) for text in query["traceID"]]
            traces = [found for found in map(self._store.find, ids) if found]
        else:
            traces = await search(self._store, _query(query))
        return _json(reading.envelope([reading.trace(each) for each in traces]))

    def _trace(self, text: str) -> HttpAnswer:
        found = self._store.find(_trace_id(text))
        if found is None:
            return _json(reading.failure(404, "trace not found"), 404)
        return _json(reading.envelope([reading.trace(found)]))


@cache
def page() -> bytes:
    """The page: a list of traces, and one trace's waterfall."""
    return resources.files("devtools.trace_viewer").joinpath("page.html").read_bytes()


def _json(value: reading.Json, status: int = 200) -> HttpAnswer:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return HttpAnswer(status, body, {"content-type": "application/json; charset=utf-8"})


def _query(query: Mapping[str, list[str]]) -> Query:
    lookback = _duration(query, "lookback", 0)
    return Query(
        service=_one(query, "service"),
        operation=_one(query, "operation"),
        tags=_tags(query),
        min_duration_ns=_duration(query, "minDuration", 0),
        max_duration_ns=_duration(query, "maxDuration", 2**63),
        start_ns=_integer(query, "start", 0) * 1000 or (since(lookback / 1e9) if lookback else 0),
        end_ns=_integer(query, "end", 2**63 // 1000) * 1000,
        limit=min(_integer(query, "limit", _DEFAULT_TRACES), _MOST_TRACES),
    )


def _tags(query: Mapping[str, list[str]]) -> dict[str, str]:
    """Both of Jaeger's forms: `tags` is a JSON object, `tag` is key:value and may come again."""
    try:
        given = json.loads(_one(query, "tags") or "{}")
    except (ValueError, RecursionError):
        raise _Wrong("parameter 'tags' is not JSON") from None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise _Wrong("parameter 'tags' is not an object of strings")
    for pair in query.get("tag", ()):
        key, colon, value = pair.partition(":")
        if not colon:
            raise _Wrong(f"parameter 'tag': {pair!r} is not key:value")
        given[key] = value
    return given


def _one(query: Mapping[str, list[str]], name: str) -> str:
    return query.get(name, [""])[-1]


def _integer(query: Mapping[str, list[str]], name: str, default: int) -> int:
    text = _one(query, name)
    if not text:
        return default
    if not text.isdecimal() or len(text) > 20:
        raise _Wrong(f"parameter {name!r}: {text!r} is not a whole number")
    return int(text)


def _duration(query: Mapping[str, list[str]], name: str, default: int) -> int:
    """Nanoseconds of a duration as Go writes it, such as 1.5s or 1h30m."""
    text = _one(query, name)
    if not text:
        return default
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        raise _Wrong(f"parameter {name!r}: {text!r} is not a duration such as 20ms, 1.5s, 1h")
    return int(sum(float(number) * _NANOSECONDS[unit] for number, unit in _DURATION.findall(text)))


def _trace_id(text: str) -> bytes:
    """Sixteen bytes; leading zeros may be left out."""
    if not re.fullmatch("[0-9a-fA-F]{1,32}", text):
        raise _Wrong(f"{text!r} is not a trace id")
    return bytes.fromhex(text.zfill(32))


SERVICE_NAME: str = trace_service_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name


class TraceSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores the spans that exporters send."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, _context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._store.add(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@dataclass(frozen=True, slots=True)
class Viewer:
    """A viewer that listens: for exporters at `otlp_address`, for browsers at `http_address`."""

    otlp_address: str
    http_address: str
    store: TraceStore

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{self.http_address}"


@asynccontextmanager
async def open_viewer(otlp_listen: str, http_listen: str, bounds: Bounds) -> AsyncGenerator[Viewer, None]:
    """A viewer while the context is open. Raises ConfigError if it cannot listen."""
    store, health = TraceStore(bounds), Health()
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    async with AsyncExitStack() as stack:
        services = [Service(SERVICE_NAME, add, TraceSink(store))]
        server = await stack.enter_async_context(serve(otlp_listen, services, health=health, drain_seconds=1.0))
        port = await stack.enter_async_context(serve_http(http_listen, TraceApi(store).answer))
        health.set("", True)
        yield Viewer(server.address, f"{http_listen.rpartition(':')[0]}:{port}", store)
