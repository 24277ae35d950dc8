"""Reads traces from Jaeger's query API: of `baton traces`, or of Jaeger."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest, RequestNotFound, Unavailable

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
    spans = [_span(span, services[span["processID"]]) for span in trace["spans"]]
    return ReadTrace(trace["traceID"], sorted(spans, key=lambda span: span.start))


def _span(span: Mapping[str, Any], service: str) -> ReadSpan:
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
