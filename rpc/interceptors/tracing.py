"""A span for each call of a request, as a child of its caller's."""

from collections.abc import Awaitable
from typing import Any

from grpc import StatusCode, aio
from opentelemetry.trace import SpanKind

from baton.errors import BatonError, DeadlineExceeded
from baton_http2.server.methods import Behaviour, Context
from rpc.interceptors.calls import Wrapper
from rpc.interceptors.logging import identity, request_within
from rpc.metadata import remaining_seconds, was_left_at_its_deadline
from rpc.status import code_of
from rpc.tracing.propagation import is_undecided, read_context
from rpc.tracing.recording import is_departure
from rpc.tracing.span import Span, entered
from rpc.tracing.tracer import Tracer
from runtime.aio import leaf_errors
from runtime.clock import monotonic
from runtime.telemetry.logs import add_log_fields


def trace_calls(tracer: Tracer) -> Wrapper:
    """A call continues its caller's trace. Without one, a call of a request, which has a field request_id, starts one.

    Other calls (health, load, leases) start none: there are many. The trace's id is on every log line.
    """

    def wrap(method: str, behaviour: Behaviour) -> Behaviour:
        name = method.removeprefix("/")

        # No coroutine: it would only wait for the one within.
        def traced(request: Any, context: Context) -> Awaitable[Any]:
            parent = read_context(context.invocation_metadata())
            if parent is None and not tracer.is_on:
                return behaviour(request, context)
            if (parent is None or is_undecided(parent)) and request_within(request) is None:
                return behaviour(request, context)
            return served(tracer.begin(name, parent, SpanKind.SERVER), request, context)

        async def served(span: Span, request: Any, context: Context) -> Any:
            add_log_fields(trace_id=span.trace_id)
            if not span.is_recording:
                with entered(span):
                    return await behaviour(request, context)
            span.set({"rpc.system.name": "grpc", "rpc.method": name, **_request_id(request, context)})
            with _Served(span, context):
                return await behaviour(request, context)

        return traced

    return wrap


class _Served:
    """Ends a call's span with the status of the call."""

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self._context = context
        self._began = monotonic()
        self._entered = entered(span)

    def __enter__(self) -> None:
        self._entered.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._entered.__exit__(None, None, None)
        if error is not None and is_departure(leaf_errors(error)[0]) and self._was_left_at_its_deadline():
            error = DeadlineExceeded("the caller's deadline passed")
        self._span.set({"rpc.response.status_code": self._code(error)})
        if error is not None:
            self._span.fail(error)
        self._span.end()

    def _was_left_at_its_deadline(self) -> bool:
        return was_left_at_its_deadline(remaining_seconds(self._context), monotonic() - self._began)

    def _code(self, error: BaseException | None) -> str:
        if error is None:
            return StatusCode.OK.name
        first = leaf_errors(error)[0]
        if isinstance(first, aio.AbortError):
            code: Any = self._context.code()
            return str(getattr(code, "name", code))
        if is_departure(first):
            return StatusCode.CANCELLED.name
        return code_of(type(first)).name if isinstance(first, BatonError) else StatusCode.INTERNAL.name


def _request_id(request: Any, context: Context) -> dict[str, str]:
    return {f"baton.{key}": value for key, value in identity(request, context).items()}
