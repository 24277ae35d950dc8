"""A trace as Jaeger's query API tells it, read back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
