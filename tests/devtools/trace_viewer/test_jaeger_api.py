"""Jaeger's query API over HTTP, in the shapes that Jaeger's clients read."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.servers.otlp import START_NS, Made, trace_id, viewing

from devtools.trace_viewer.api import Viewer
from devtools.trace_viewer.store import Bounds

START_US = START_NS // 1000


@pytest.fixture
async def viewer() -> AsyncIterator[Viewer]:
    """Three traces: an ordinary one over two services, a failed one, and a slow one."""
    spans = (
        Made(1, 1, name="generate", milliseconds=100, attributes={"id": "r-1", "tokens": 7}),
        Made(1, 2, parent=1, name="prefill", service="prefill", start=10, kind=Span.SPAN_KIND_SERVER),
        Made(1, 3, parent=1, name="decode", service="decode", start=25, milliseconds=70, links=[(1, 2)]),
        Made(2, 1, name="generate", start=1000, error="no worker is ready", events=[("exception", {"why": "gone"})]),
        Made(3, 1, name="generate", start=2000, milliseconds=5000, attributes={"ok": True, "list": ["a", "b"]}),
    )
    async with viewing(*spans) as open_viewer:
        yield open_viewer


async def get(viewer: Viewer, path: str, **headers: str) -> tuple[int, Any]:
    def fetch() -> tuple[int, Any]:
        request = urllib.request.Request(viewer.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    return await asyncio.to_thread(fetch)


async def data(viewer: Viewer, path: str) -> Any:
    status, answer = await get(viewer, path)
    assert (status, answer["errors"]) == (200, None)
    return answer["data"]


async def found(viewer: Viewer, **query: str) -> list[int]:
    """The traces that a search finds, in its order."""
    return [int(trace["traceID"], 16) for trace in await data(viewer, f"/api/traces?{urlencode(query)}")]


async def test_services_are_in_the_envelope_that_every_answer_has(viewer: Viewer) -> None:
    assert await get(viewer, "/api/services") == (
        200,
        {"data": ["decode", "prefill", "router"], "total": 3, "limit": 0, "offset": 0, "errors": None},
    )


async def test_operations_of_a_service_are_names(viewer: Viewer) -> None:
    assert await data(viewer, "/api/services/prefill/operations") == ["prefill"]


async def test_operations_have_their_kind(viewer: Viewer) -> None:
    assert await data(viewer, "/api/operations?service=prefill") == [{"name": "prefill", "spanKind": "server"}]
    assert await data(viewer, "/api/operations?service=prefill&spanKind=client") == []


async def test_dependencies_count_calls_between_services(viewer: Viewer) -> None:
    assert await data(viewer, "/api/dependencies?endTs=1700000000000&lookback=1000") == [
        {"parent": "router", "child": "decode", "callCount": 1},
        {"parent": "router", "child": "prefill", "callCount": 1},
    ]


async def test_a_trace_names_its_spans_and_their_processes(viewer: Viewer) -> None:
    (trace,) = await data(viewer, f"/api/traces/{trace_id(1)}")
    assert trace["traceID"] == trace_id(1)
    assert [(span["operationName"], span["processID"]) for span in trace["spans"]] == [
        ("generate", "p1"),
        ("prefill", "p2"),
        ("decode", "p3"),
    ]
    assert trace["processes"]["p2"] == {
        "serviceName": "prefill",
        "tags": [{"key": "service.instance.id", "type": "string", "value": "i-1"}],
    }
    assert trace["warnings"] is None


async def test_times_are_microseconds(viewer: Viewer) -> None:
    (trace,) = await data(viewer, f"/api/traces/{trace_id(1)}")
    assert [(span["startTime"] - START_US, span["duration"]) for span in trace["spans"]] == [
        (0, 100_000),
        (10_000, 10_000),
        (25_000, 70_000),
    ]


async def test_parents_and_links_are_references(viewer: Viewer) -> None:
    (trace,) = await data(viewer, f"/api/traces/{trace_id(1)}")
    assert trace["spans"][0]["references"] == []
    assert trace["spans"][2]["references"] == [
        {"refType": "CHILD_OF", "traceID": trace_id(1), "spanID": f"{1:016x}"},
        {"refType": "FOLLOWS_FROM", "traceID": trace_id(1), "spanID": f"{2:016x}"},
    ]


async def test_attributes_are_tags_with_their_types(viewer: Viewer) -> None:
    (trace,) = await data(viewer, f"/api/traces/{trace_id(3)}")
    tags = {tag["key"]: (tag["type"], tag["value"]) for tag in trace["spans"][0]["tags"]}
    assert tags == {
        "ok": ("bool", True),
        "list": ("string", '["a", "b"]'),
        "span.kind": ("string", "internal"),
        "otel.scope.name": ("string", "baton 1"),
    }


async def test_a_failure_has_the_tags_by_which_jaeger_finds_it(viewer: Viewer) -> None:
    (trace,) = await data(viewer, f"/api/traces/{trace_id(2)}")
    tags = {tag["key"]: tag["value"] for tag in trace["spans"][0]["tags"]}
    assert tags["error"] is True
    assert (tags["otel.status_code"], tags["otel.status_description"]) == ("ERROR", "no worker is ready")


async def test_events_are_logs(viewer: Viewer) -> None:
    (trace,) = await data(viewer, f"/api/traces/{trace_id(2)}")
    (log,) = trace["spans"][0]["logs"]
    assert log["timestamp"] == START_US + 1_000_000
    assert [(field["key"], field["value"]) for field in log["fields"]] == [("event", "exception"), ("why", "gone")]


async def test_the_newest_traces_come_first_and_no_more_than_asked_for(viewer: Viewer) -> None:
    assert await found(viewer, service="router") == [3, 2, 1]
    assert await found(viewer, service="router", limit="2") == [3, 2]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"service": "decode"}, [1]),
        ({"service": "router", "operation": "prefill"}, []),
        ({"service": "router", "minDuration": "1s"}, [3]),
        ({"service": "router", "minDuration": "20ms", "maxDuration": "1.5s"}, [1]),
        ({"tags": '{"error":"true"}'}, [2]),
        ({"tag": "error:true"}, [2]),
        ({"tags": '{"id":"r-1","tokens":"7"}'}, [1]),
        ({"tag": "why:gone"}, [2]),
        ({"tag": "service.instance.id:i-1", "service": "prefill"}, [1]),
        ({"start": str(START_US + 500_000), "end": str(START_US + 1_500_000)}, [2]),
        ({"lookback": "1h"}, []),  # they are of 2023
        ({"traceID": trace_id(2)}, [2]),
        ({"traceID": trace_id(9)}, []),
    ],
)
async def test_a_search_finds(viewer: Viewer, query: dict[str, str], expected: list[int]) -> None:
    assert await found(viewer, **query) == expected


async def test_an_id_may_leave_out_its_leading_zeros(viewer: Viewer) -> None:
    (trace,) = await data(viewer, "/api/traces/1")
    assert trace["traceID"] == trace_id(1)


async def test_a_trace_that_is_not_here_is_404(viewer: Viewer) -> None:
    status, answer = await get(viewer, f"/api/traces/{trace_id(9)}")
    assert (status, answer["data"], answer["errors"]) == (404, None, [{"code": 404, "msg": "trace not found"}])


@pytest.mark.parametrize(
    "query",
    [
        "minDuration=soon",
        f"minDuration={'9' * 400}h",
        "limit=many",
        "tags=%7B",
        "tags=%5B1%5D",
        f"tags={'[' * 8000}",
        "tag=nothing",
        "traceID=xyz",
        "start=-1",
    ],
)
async def test_a_parameter_that_is_wrong_is_named(viewer: Viewer, query: str) -> None:
    status, answer = await get(viewer, f"/api/traces?{query}")
    assert (status, answer["data"]) == (400, None)
    assert query.partition("=")[0] in answer["errors"][0]["msg"] or "xyz" in answer["errors"][0]["msg"]


async def test_a_trace_that_was_cut_says_so() -> None:
    bounds = Bounds(max_spans_per_trace=2)
    async with viewing(*(Made(1, number) for number in range(1, 6)), bounds=bounds) as viewer:
        (trace,) = await data(viewer, f"/api/traces/{trace_id(1)}")
    assert trace["warnings"] == ["3 more spans came and were not kept"]


async def test_names_with_slashes_are_found() -> None:
    async with viewing(Made(1, 1, name="a/b", service="x/y")) as viewer:
        assert await data(viewer, f"/api/services/{quote('x/y', safe='')}/operations") == ["a/b"]
