"""A recorded span until it ends, when it becomes one of OpenTelemetry's and is exported.

Not the SDK's spans, which are thread-safe and check each attribute: ours belong to one event loop, and cost a third.

Errors, as a span records them.

| it raised | span status | attributes | event |
|---|---|---|---|
| Cancelled | unset: nothing is wrong | baton.outcome = CANCELLED, baton.cancelled_by = request | cancelled |
| its task was cancelled, or its caller is gone | unset | the same, baton.cancelled_by = departure | cancelled |
| any other BatonError | ERROR, its message | baton.outcome = error.type = its reason, stage, worker | exception |
| anything else | ERROR, internal error | baton.outcome = INTERNAL_ERROR, error.type = class | exception, with stack |
| a refusal of what the request can do without | unset | baton.refused = its reason | refused |

A span without baton.outcome, or with OK, ended well. Client mistakes are errors too: a refused request should be found.
"""

import asyncio
import random
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grpc import aio
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from baton.errors import BatonError, Cancelled, HandoffLost, Overloaded, Unsupported
from rpc.tracing.propagation import decided, is_undecided
from runtime.aio import leaf_errors

_LONGEST_TEXT = 1024
_LONGEST_STACK = 8192

# What an optional attempt may meet on a healthy cluster: no room, a lease that has ended, a way that is not there.
_REFUSALS = (HandoffLost, Overloaded, Unsupported)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a span records it: attributes, one event, and a status message, None for a cancellation."""

    attributes: Mapping[str, str]
    event: str
    details: Mapping[str, str]
    message: str | None = None


def describe(error: BaseException) -> Failure:
    """The record of the error that ended a span; of a group of errors, of the first."""
    found = leaf_errors(error)
    first = next((one for one in found if not isinstance(one, BatonError)), found[0])
    if is_departure(first):
        return _cancel("departure", "the caller left, or cancelled the call")
    if isinstance(first, Cancelled):
        return _cancel("request", first.message)
    return _known(first) if isinstance(first, BatonError) else _unexpected(first)


def describe_refusal(error: BaseException) -> Failure | None:
    """The record of an error that ended an optional attempt; None unless it is an expected refusal."""
    found = leaf_errors(error)
    first = found[0]
    if not isinstance(first, BatonError) or not all(isinstance(one, _REFUSALS) for one in found):
        return None
    return Failure({"baton.refused": first.reason}, "refused", {"baton.reason": first.message[:_LONGEST_TEXT]})


def is_departure(error: BaseException) -> bool:
    """True if the caller is gone: the task was cancelled, or gRPC could not write to the peer."""
    if isinstance(error, aio.BaseError):
        return not isinstance(error, aio.AbortError)
    return isinstance(error, (asyncio.CancelledError, GeneratorExit))


def _cancel(cancelled_by: str, why: str) -> Failure:
    attributes = {"baton.outcome": Cancelled.reason, "baton.cancelled_by": cancelled_by}
    return Failure(attributes, "cancelled", {"baton.reason": why[:_LONGEST_TEXT]})


def _known(error: BatonError) -> Failure:
    message = error.message[:_LONGEST_TEXT]
    where = {"baton.error.stage": error.stage, "baton.error.worker_id": error.worker_id}
    attributes = {"baton.outcome": error.reason, "error.type": error.reason}
    attributes.update({key: value for key, value in where.items() if value})
    details = {"exception.type": type(error).__qualname__, "exception.message": message}
    return Failure(attributes, "exception", details, message)


def _unexpected(error: BaseException) -> Failure:
    kind = type(error).__qualname__
    stack = "".join(traceback.format_exception(error))[-_LONGEST_STACK:]
    message = str(error)[:_LONGEST_TEXT]
    details = {"exception.type": kind, "exception.message": message, "exception.stacktrace": stack}
    return Failure({"baton.outcome": BatonError.reason, "error.type": kind}, "exception", details, "internal error")


AttributeValue: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes: TypeAlias = Mapping[str, AttributeValue]

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED = TraceFlags(TraceFlags.DEFAULT)
_UNSET = Status(StatusCode.UNSET)


@dataclass(frozen=True, slots=True)
class Sink:
    """The processor and resource of recorded spans, and which traces are recorded.

    Those whose low 64 bits are below `sampled_below`, as OpenTelemetry's TraceIdRatioBased decides.
    """

    processor: SpanProcessor
    resource: Resource
    scope: InstrumentationScope
    sampled_below: int

    def samples(self, trace_id: int) -> bool:
        """True if a trace is recorded whose caller does not decide that."""
        return trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self.sampled_below


class Recorder:
    """Records the spans of one call. Holds their sink, and the offset of their clock.

    Times are seconds of time.perf_counter, so that setting the wall clock never distorts a trace. `epoch_ns` is added
    to them: the Unix time at which that counter was 0, looked up once for each call.
    """

    __slots__ = ("_epoch_ns", "sink")

    def __init__(self, sink: Sink, epoch_ns: int) -> None:
        self.sink = sink
        self._epoch_ns = epoch_ns

    def first(self, name: str, trace_id: int, started: float, kind: SpanKind) -> "Recording":
        """The first span of a trace."""
        context = SpanContext(trace_id, random_id(64), False, _SAMPLED)
        return Recording(self, name, (context, None), started, kind)

    def begin(
        self, name: str, parent: SpanContext, started: float, kind: SpanKind
    ) -> tuple[SpanContext, "Recording | None"]:
        """The first span in this process of the caller's trace; None if it is not recorded.

        The caller decides that, unless it left the decision to this process.
        """
        is_sampled = parent.trace_flags.sampled
        if is_undecided(parent):
            is_sampled = self.sink.samples(parent.trace_id)
            parent = decided(parent, is_sampled=is_sampled)
        context = _below(parent)
        return context, Recording(self, name, (context, parent), started, kind) if is_sampled else None

    def unix_ns(self, seconds: float) -> int:
        """A time in Unix nanoseconds."""
        return self._epoch_ns + int(seconds * 1e9)


class Recording:
    """A span that is being recorded. Its times are of time.perf_counter.

    Changes after its end are dropped, because the exporter's thread reads it then.
    """

    __slots__ = (
        *("_attributes", "_events", "_has_ended", "_kind", "_links", "_name", "_parent", "_recorder", "_started"),
        *("_status", "context"),
    )

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        contexts: tuple[SpanContext, SpanContext | None],
        started: float,
        kind: SpanKind,
    ) -> None:
        self.context, self._parent = contexts
        self._attributes: dict[str, AttributeValue] = {}
        self._recorder = recorder
        self._name = name
        self._started = started
        self._kind = kind
        self._events: list[Event] = []
        self._links: list[Link] = []
        self._status: Status | None = None
        self._has_ended = False

    def child(self, name: str, started: float, kind: SpanKind) -> "Recording":
        """A child span."""
        return Recording(self._recorder, name, (_below(self.context), self.context), started, kind)

    def set(self, attributes: Attributes) -> None:
        """Adds attributes, or replaces them."""
        if not self._has_ended:
            self._attributes.update(attributes)

    def event(self, name: str, attributes: Attributes, at: float) -> None:
        """Notes that something happened."""
        if not self._has_ended:
            self._events.append(Event(name, attributes, self._recorder.unix_ns(at)))

    def link(self, context: SpanContext, attributes: Attributes) -> None:
        """Links to another span."""
        if not self._has_ended:
            self._links.append(Link(context, attributes))

    def fail(self, error: BaseException) -> None:
        """Records the error that ended it. Only the first one is kept."""
        if self._status is not None or self._has_ended:
            return
        self._record(describe(error))

    def refuse(self, error: BaseException) -> None:
        """Records an expected refusal, which is then kept; ignores any other error."""
        refusal = describe_refusal(error)
        if refusal is not None and self._status is None and not self._has_ended:
            self._record(refusal)

    def _record(self, failure: Failure) -> None:
        self.set(failure.attributes)
        self._events.append(Event(failure.event, failure.details))
        self._status = _UNSET if failure.message is None else Status(StatusCode.ERROR, failure.message)

    def end(self, ended: float) -> None:
        """Ends and exports it, once."""
        if self._has_ended:
            return
        self._has_ended = True
        sink, unix_ns = self._recorder.sink, self._recorder.unix_ns
        sink.processor.on_end(
            ReadableSpan(
                self._name,
                self.context,
                self._parent,
                sink.resource,
                self._attributes,
                self._events,
                self._links,
                self._kind,
                status=self._status or _UNSET,
                start_time=unix_ns(self._started),
                end_time=unix_ns(ended),
                instrumentation_scope=sink.scope,
            )
        )


def _below(parent: SpanContext) -> SpanContext:
    """The child of a span of the same trace."""
    flags = _SAMPLED if parent.trace_flags.sampled else _UNSAMPLED
    return SpanContext(parent.trace_id, random_id(64), False, flags, parent.trace_state)


def random_id(bits: int) -> int:
    """A random id; never 0, which is invalid."""
    return random.getrandbits(bits) or 1
