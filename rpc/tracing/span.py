"""`Span`, recorded or not, and the current span of a task."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from baton.connection.credentials import Metadata
from baton.connection.tracing import TRACEPARENT
from rpc.tracing.propagation import format_traceparent, metadata_of, parse_traceparent
from rpc.tracing.recording import Attributes, AttributeValue, Recording, random_id
from runtime.clock import perf_counter


class Span:
    """A part of a trace. If it is not recorded, its methods do nothing, and it only propagates the trace.

    Its owner ends it, once. Times are seconds of time.perf_counter; unset is now.
    """

    __slots__ = ("_metadata", "_recording", "context", "is_recording")

    def __init__(self, context: SpanContext | None, recording: Recording | None = None) -> None:
        self.context = context
        self.is_recording = recording is not None  # whether it will be exported
        self._recording = recording
        self._metadata: Metadata | None = None

    @property
    def trace_id(self) -> str:
        """In hexadecimal; empty without a trace."""
        return f"{self.context.trace_id:032x}" if self.context else ""

    @property
    def traceparent(self) -> str:
        """Names this span to other processes; empty without a trace."""
        return format_traceparent(self.context) if self.context else ""

    @property
    def metadata(self) -> Metadata:
        """The metadata of calls within this span."""
        if self._metadata is None:
            self._metadata = metadata_of(self.context) if self.context else ()
        return self._metadata

    def child(self, name: str, *, started: float | None = None, kind: SpanKind = SpanKind.INTERNAL) -> "Span":
        """A new child span."""
        if self._recording is None:
            return self
        below = self._recording.child(name, _or_now(started), kind)
        return Span(below.context, below)

    def stage(self, name: str, started: float, ended: float, attributes: Attributes) -> None:
        """Adds a child span that has already ended, with times that were measured elsewhere."""
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
        """Links to a span outside of its ancestors, by context or traceparent. Ignores an invalid traceparent."""
        context = parse_traceparent(other) if isinstance(other, str) else other
        if self._recording is not None and context is not None:
            self._recording.link(context, {"baton.link": relation})

    def fail(self, error: BaseException) -> None:
        """Records the error that ended it; see rpc/tracing/recording.py. Only the first one is kept."""
        if self._recording is not None:
            self._recording.fail(error)

    def refuse(self, error: BaseException) -> None:
        """Records an expected refusal of an optional attempt, which `fail` then leaves. Ignores other errors."""
        if self._recording is not None:
            self._recording.refuse(error)

    def end(self, ended: float | None = None) -> None:
        """Ends it. A second call has no effect."""
        if self._recording is not None:
            self._recording.end(_or_now(ended))


class UnrecordedTrace(Span):
    """The span of a trace that is not recorded because we decide so, as of most calls: a text and nothing more."""

    __slots__ = ("_traceparent",)

    def __init__(self, trace_id: int) -> None:
        super().__init__(None)
        self._traceparent = f"00-{trace_id:032x}-{random_id(64):016x}-00"

    @property
    def trace_id(self) -> str:
        return self._traceparent[3:35]

    @property
    def traceparent(self) -> str:
        return self._traceparent

    @property
    def metadata(self) -> Metadata:
        return ((TRACEPARENT, self._traceparent),)


__all__ = [
    "NO_SPAN",
    "AttributeValue",
    "Attributes",
    "Span",
    "UnrecordedTrace",
    "current_span",
    "entered",
    "optional_attempt",
    "stage_span",
]

NO_SPAN = Span(None)

_current: ContextVar[Span] = ContextVar("baton_span", default=NO_SPAN)


current_span: Final = _current.get
"""The current span of this task, or NO_SPAN. Not a function of its own: a request asks several times."""


class entered:  # noqa: N801  # reads as a function: `with entered(span):`
    """Makes a span the current one while the context is open. Does not end it."""

    __slots__ = ("_before", "_span")

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        self._before = _current.get()
        _current.set(self._span)
        return self._span

    def __exit__(self, *exception: object) -> None:
        # Not reset(token): a token is valid in one context only, and a generator may be closed in another.
        _current.set(self._before)


class stage_span:  # noqa: N801  # reads as a function: `with stage_span("prefill") as span:`
    """A child of the current span, which is the current span while the context is open.

    An error that passes through becomes its status. If the current span is not recorded, no span is made. It ends at
    `ended`, in seconds of time.perf_counter, or when the context is left.
    """

    __slots__ = ("_attributes", "_before", "_kind", "_name", "_span", "_started", "ended")

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
        self.ended: float | None = None

    def __enter__(self) -> Span:
        before = self._before = self._span = _current.get()
        if not before.is_recording:
            return before
        self._span = before.child(self._name, kind=self._kind, started=self._started)
        if self._attributes:
            self._span.set(self._attributes)
        _current.set(self._span)
        return self._span

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._span is self._before:
            return
        _current.set(self._before)
        if error is not None:
            self._span.fail(error)
        self._span.end(self.ended)


@contextmanager
def optional_attempt() -> Iterator[None]:
    """Records an expected refusal that passes through as one, and not as the current span's error.

    For what a request can do without: see rpc/tracing/recording.py.
    """
    try:
        yield
    except BaseException as error:
        _current.get().refuse(error)
        raise


def _or_now(seconds: float | None) -> float:
    return perf_counter() if seconds is None else seconds
