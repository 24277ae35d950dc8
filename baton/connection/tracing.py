"""The span of a client's call, and the W3C trace context that the call carries.

With OpenTelemetry's API installed and a provider configured, each call is a span of kind CLIENT below the current one.
Without them nothing is recorded here, and the call carries the context of a trace that begins with it: a random trace
id, and in `tracestate` the entry `baton=undecided`, with which the router decides by its own ratio whether to record.
"""

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import grpc

from baton.connection.credentials import Metadata
from baton.errors import BatonError, Cancelled
from baton.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider
    from typing_extensions import Self

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
# The key of Baton's entry in tracestate, and its value where the caller leaves the decision about recording to us.
STATE_KEY = "baton"
UNDECIDED = "undecided"

_SCOPE = "baton-client"
_LONGEST_TEXT = 1024


class CallTrace:
    """The trace of one call: `metadata` to send, `trace_id` in hexadecimal, and the span if one is recorded.

    As a context it ends the span, with the error that leaves the context.
    """

    __slots__ = ("_span", "metadata", "trace_id")

    def __init__(self, trace_id: str, metadata: Metadata, span: "Span | None" = None) -> None:
        self.trace_id = trace_id
        self.metadata = metadata
        self._span = span

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def identify(self, request_id: str) -> None:
        """Adds the id of the request, once the router has said it."""
        if self._span is not None and request_id:
            self._span.set_attribute("baton.request_id", request_id)

    def retry(self, error: BatonError, pause_seconds: float) -> None:
        """Notes that an attempt failed and that another one follows."""
        if self._span is not None:
            details: dict[str, str | float] = {"error.type": error.reason, "baton.pause_seconds": pause_seconds}
            self._span.add_event("retry", details)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the span. `error` ended the call; an exception that is no BatonError means that the caller left it."""
        if self._span is None:
            return
        if error is None:
            self._span.set_attribute("rpc.response.status_code", "OK")
        elif isinstance(error, BatonError) and not isinstance(error, Cancelled):
            _fail(self._span, error)
        else:
            _cancel(self._span)
        self._span.end()


def begin(method: str, address: str, provider: "TracerProvider | None" = None) -> CallTrace:
    """Starts the span of a call to `package.Service/Method`, below the current span; it ends with the context.

    `provider` is OpenTelemetry's; by default the global one.
    """
    api = _opentelemetry()
    if api is None:
        return _unrecorded()
    host, _, port = address.rpartition(":")
    attributes: dict[str, str | int] = {"rpc.system.name": "grpc", "rpc.method": method, "server.address": host}
    if port.isdecimal():
        attributes["server.port"] = int(port)
    tracer = api.get_tracer(_SCOPE, __version__, provider)
    span = tracer.start_span(method, kind=api.SpanKind.CLIENT, attributes=attributes)
    context = span.get_span_context()
    if not context.is_valid:
        return _unrecorded()
    trace_id = f"{context.trace_id:032x}"
    metadata: Metadata = ((TRACEPARENT, f"00-{trace_id}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"),)
    if context.trace_state:
        metadata += ((TRACESTATE, context.trace_state.to_header()),)
    return CallTrace(trace_id, metadata, span)


@cache
def _opentelemetry() -> Any:
    """The module opentelemetry.trace; None if it is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


def _unrecorded() -> CallTrace:
    # An id of 0 is not valid.
    trace_id = f"{random.getrandbits(128) or 1:032x}"
    span_id = f"{random.getrandbits(64) or 1:016x}"
    return CallTrace(trace_id, ((TRACEPARENT, f"00-{trace_id}-{span_id}-00"), (TRACESTATE, f"{STATE_KEY}={UNDECIDED}")))


def _fail(span: "Span", error: BatonError) -> None:
    from opentelemetry.trace import Status, StatusCode

    message = error.message[:_LONGEST_TEXT]
    code = error.__cause__.code() if isinstance(error.__cause__, grpc.RpcError) else None
    attributes = {
        "baton.outcome": error.reason,
        "error.type": error.reason,
        "baton.error.stage": error.stage,
        "baton.error.worker_id": error.worker_id,
        "rpc.response.status_code": getattr(code, "name", "UNKNOWN"),
    }
    span.set_attributes({key: value for key, value in attributes.items() if value})
    span.add_event("exception", {"exception.type": type(error).__qualname__, "exception.message": message})
    span.set_status(Status(StatusCode.ERROR, message))


def _cancel(span: "Span") -> None:
    span.set_attributes(
        {"rpc.response.status_code": "CANCELLED", "baton.outcome": Cancelled.reason, "baton.cancelled_by": "client"}
    )
    span.add_event("cancelled")
