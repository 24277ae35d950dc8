"""W3C trace context (https://www.w3.org/TR/trace-context/) in the metadata of calls."""

from collections.abc import Iterable

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from baton.connection.credentials import Metadata
from baton.connection.tracing import STATE_KEY, TRACEPARENT, TRACESTATE, UNDECIDED

# The specification requires that at least this many characters are passed on.
_LONGEST_STATE = 512
# What clients without OpenTelemetry send; parsing it takes most of what parsing a context takes.
_UNDECIDED_HEADER = f"{STATE_KEY}={UNDECIDED}"
_UNDECIDED_STATE = TraceState([(STATE_KEY, UNDECIDED)])
_HEX = frozenset("0123456789abcdef")


def read_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> SpanContext | None:
    """The caller's span; None if it sent none, or one that is not valid."""
    parent = ""
    states: list[str] = []
    for key, value in metadata or ():
        if key == TRACEPARENT:
            if parent:
                return None  # Two parents are invalid.
            parent = str(value)
        elif key == TRACESTATE:
            states.append(str(value))
    return parse_traceparent(parent, ",".join(states)) if parent else None


def parse_traceparent(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """The span that `traceparent` names; None if it is not valid. A `tracestate` that is not valid is left out."""
    version, *fields = traceparent.split("-")
    # Later versions may append fields; version ff is none.
    if not _is_hex(version, 2) or version == "ff" or len(fields) < 3 or (version == "00" and len(fields) > 3):
        return None
    trace_id, span_id, flags = fields[:3]
    if not (_is_hex(trace_id, 32) and _is_hex(span_id, 16) and _is_hex(flags, 2)):
        return None
    context = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=_state(tracestate),
    )
    return context if context.is_valid else None


def is_undecided(context: SpanContext) -> bool:
    """True if the caller began the trace without deciding whether to record it, as clients without OpenTelemetry do."""
    return context.trace_state.get(STATE_KEY) == UNDECIDED


def decided(context: SpanContext, *, is_sampled: bool) -> SpanContext:
    """The caller's span with our sampling decision, without the mark `undecided`."""
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    state = context.trace_state.delete(STATE_KEY)
    return SpanContext(context.trace_id, context.span_id, True, flags, state)


def format_traceparent(context: SpanContext) -> str:
    """The header that names a span."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"


def metadata_of(context: SpanContext) -> Metadata:
    """The metadata with which a server continues the trace."""
    parent = (TRACEPARENT, format_traceparent(context))
    return (parent, (TRACESTATE, context.trace_state.to_header())) if context.trace_state else (parent,)


def _state(tracestate: str) -> TraceState | None:
    if tracestate == _UNDECIDED_HEADER:
        return _UNDECIDED_STATE
    return TraceState.from_header([tracestate]) if 0 < len(tracestate) <= _LONGEST_STATE else None


def _is_hex(text: str, length: int) -> bool:
    return len(text) == length and _HEX.issuperset(text)
