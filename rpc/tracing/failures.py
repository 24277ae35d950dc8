"""Errors, as a span records them.

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
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from grpc import aio

from baton.errors import BatonError, Cancelled, HandoffLost, Overloaded, Unsupported
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
