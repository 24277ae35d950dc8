"""How spans say that something did not end well.

| it raised | span status | attributes | event |
|---|---|---|---|
| Cancelled | unset: nothing is wrong | baton.outcome = CANCELLED, baton.cancelled_by = request | cancelled |
| its task was cancelled, or its caller is gone | unset | the same, baton.cancelled_by = departure | cancelled |
| any other BatonError | ERROR, its message | baton.outcome = error.type = its reason, stage, worker | exception |
| anything else | ERROR, internal error | baton.outcome = INTERNAL_ERROR, error.type = class | exception, with stack |

A span without baton.outcome, or with OK, ended well. Client mistakes are errors too: a refused request should be found.
"""

import asyncio
import traceback

from grpc import aio
from opentelemetry.trace import Span, Status, StatusCode

from rpc.causes import causes
from rpc.errors import BatonError, Cancelled

_LONGEST_TEXT = 1024
_LONGEST_STACK = 8192


def record(span: Span, error: BaseException) -> None:
    """Puts an error that ended a span into it. Of a group that tasks have raised, the first is meant."""
    found = causes(error)
    first = next((one for one in found if not isinstance(one, BatonError)), found[0])
    if is_departure(first):
        _record_cancel(span, "departure", "its caller left, or stopped it")
    elif isinstance(first, Cancelled):
        _record_cancel(span, "request", first.message)
    elif isinstance(first, BatonError):
        _record_known(span, first)
    else:
        _record_unexpected(span, first)


def is_departure(error: BaseException) -> bool:
    """Whether nobody waits any more: the task was cancelled, or gRPC could not write because its peer has gone."""
    if isinstance(error, aio.BaseError):
        return not isinstance(error, aio.AbortError)
    return isinstance(error, (asyncio.CancelledError, GeneratorExit))


def _record_cancel(span: Span, cancelled_by: str, why: str) -> None:
    span.set_attributes({"baton.outcome": Cancelled.reason, "baton.cancelled_by": cancelled_by})
    span.add_event("cancelled", {"baton.reason": why[:_LONGEST_TEXT]})


def _record_known(span: Span, error: BatonError) -> None:
    message = error.message[:_LONGEST_TEXT]
    where = {"baton.error.stage": error.stage, "baton.error.worker_id": error.worker_id}
    span.set_attributes({"baton.outcome": error.reason, "error.type": error.reason})
    span.set_attributes({key: value for key, value in where.items() if value})
    span.set_status(Status(StatusCode.ERROR, message))
    span.add_event("exception", {"exception.type": type(error).__qualname__, "exception.message": message})


def _record_unexpected(span: Span, error: BaseException) -> None:
    kind = type(error).__qualname__
    span.set_attributes({"baton.outcome": BatonError.reason, "error.type": kind})
    span.set_status(Status(StatusCode.ERROR, "internal error"))
    stack = "".join(traceback.format_exception(error))[-_LONGEST_STACK:]
    message = str(error)[:_LONGEST_TEXT]
    span.add_event("exception", {"exception.type": kind, "exception.message": message, "exception.stacktrace": stack})
