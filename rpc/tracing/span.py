"""A span, recorded or not, and the one that the running task is in."""

import time
from contextvars import ContextVar
from types import TracebackType

from opentelemetry.trace import SpanContext, SpanKind, format_trace_id

from rpc.tracing.propagation import Metadata, format_traceparent, metadata_of, parse_traceparent
from rpc.tracing.recording import Attributes, AttributeValue, Recorder, Recording


class Span:
    """A part of a trace. Where it is not recorded its methods do nothing, and it only passes the trace on.

    Its owner ends it, once. Times are seconds of time.perf_counter; unset is now.
    """

    __slots__ = ("_metadata", "_recording", "context")

    def __init__(self, context: SpanContext | None, recording: Recording | None = None) -> None:
        self.context = context
        self._recording = recording
        self._metadata: Metadata | None = None

    @property
    def is_recording(self) -> bool:
        """Whether anybody will see it."""
        return self._recording is not None

    @property
    def trace_id(self) -> str:
        """In hexadecimal; empty without a trace."""
        return format_trace_id(self.context.trace_id) if self.context else ""

    @property
    def traceparent(self) -> str:
        """Names this span to other processes; empty without a trace."""
        return format_traceparent(self.context) if self.context else ""

    @property
    def metadata(self) -> Metadata:
        """What calls made within this span carry."""
        if self._metadata is None:
            self._metadata = metadata_of(self.context) if self.context else ()
        return self._metadata

    def child(self, name: str, *, started: float | None = None, kind: SpanKind = SpanKind.INTERNAL) -> "Span":
        """A new span below this one."""
        if self._recording is None:
            return self
        below = self._recording.child(name, _or_now(started), kind)
        return Span(below.context, below)

    def stage(self, name: str, started: float, ended: float, attributes: Attributes) -> None:
        """A span below this one that is over already: what was measured elsewhere is not measured again."""
        if self._recording is not None:
            below = self._recording.child(name, started, SpanKind.INTERNAL)
            below.set(attributes)
            below.end(ended)

    def set(self, attributes: Attributes) -> None:
        """Adds attributes, or replaces them."""
        if self._recording is not None:
            self._recording.set(attributes)

    def event(self, name: str, attributes: Attributes | None = None, *, at: float | None = None) -> None:
        """Notes that something happened."""
        if self._recording is not None:
            self._recording.event(name, attributes or {}, _or_now(at))

    def link(self, other: "SpanContext | str | None", relation: str) -> None:
        """Points to a span that is not above this one, by its context or its traceparent; none if that is invalid."""
        context = parse_traceparent(other) if isinstance(other, str) else other
        if self._recording is not None and context is not None:
            self._recording.link(context, {"baton.link": relation})

    def fail(self, error: BaseException) -> None:
        """Says how it ended, if not well; see rpc/tracing/failures.py. Who says so first knows best."""
        if self._recording is not None:
            self._recording.fail(error)

    def end(self, ended: float | None = None) -> None:
        """It is over. A second end changes nothing."""
        if self._recording is not None:
            self._recording.end(_or_now(ended))


__all__ = [
    "NO_SPAN",
    "AttributeValue",
    "Attributes",
    "Span",
    "begin",
    "current_span",
    "entered",
    "stage_span",
]

NO_SPAN = Span(None)

_current: ContextVar[Span] = ContextVar("baton_span", default=NO_SPAN)


def begin(recorder: Recorder, name: str, parent: SpanContext | None, *, started: float, kind: SpanKind) -> Span:
    """The first span of a call in this process; whether it is recorded is for the recorder to say."""
    context, recording = recorder.begin(name, parent, started, kind)
    return Span(context, recording)


def current_span() -> Span:
    """The span that this task is in; NO_SPAN if it is in none."""
    return _current.get()


class entered:  # noqa: N801  # reads as a function: `with entered(span):`
    """Makes a span the current one while the context is open. Does not end it."""

    __slots__ = ("_before", "_span")

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        self._before = _current.get()
        _current.set(self._span)
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Set, not reset by a token: a token is good for one context only, and a generator may be closed in another.
        _current.set(self._before)


class stage_span:  # noqa: N801  # reads as a function: `with stage_span("prefill") as span:`
    """A span below the current one, for as long as the context is open, and current within it.

    An error that passes through becomes its status. Nothing is made where the current span is not recorded.
    """

    __slots__ = ("_attributes", "_before", "_kind", "_name", "_span", "_started")

    def __init__(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        started: float | None = None,
    ) -> None:
        self._name = name
        self._attributes = attributes
        self._kind = kind
        self._started = started

    def __enter__(self) -> Span:
        self._before = _current.get()
        self._span = self._before.child(self._name, kind=self._kind, started=self._started)
        if self._attributes:
            self._span.set(self._attributes)
        _current.set(self._span)
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.set(self._before)
        if self._span is self._before:
            return
        if error is not None:
            self._span.fail(error)
        self._span.end()


def _or_now(seconds: float | None) -> float:
    return time.perf_counter() if seconds is None else seconds
