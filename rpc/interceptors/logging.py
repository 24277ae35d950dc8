"""Adds the request id to every log line of a call, and logs one line at the end of the call."""

from functools import cache
from typing import Any

import grpc
from grpc import aio

from baton_http2.server.methods import Behaviour, Context
from baton_http2.wire.metadata import STATUS_CODES
from rpc.metadata import client_request_id, remaining_seconds, was_left_at_its_deadline
from runtime.clock import monotonic
from runtime.telemetry.logs import FrequentLogger, add_log_fields, log_fields, set_log_fields

_log = FrequentLogger(__name__)

_CODE_NAMES = {number: code.name for number, code in STATUS_CODES.items()}


def log_call(method: str, behaviour: Behaviour) -> Behaviour:
    """Binds request_id and method during the call, and logs its status code and duration.

    Successful calls without a request (health, load, leases) are logged at debug level: there are many.
    """

    async def logged(request: Any, context: Context) -> Any:
        started = monotonic()
        before = log_fields()
        add_log_fields(method=method, **identity(request, context))
        ended = False
        try:
            response = await behaviour(request, context)
            ended = True
            return response
        except aio.AbortError:
            ended = True
            raise
        finally:
            seconds = monotonic() - started
            _log_end(_code_name(context) if ended else _abandoned_code_name(context, seconds), seconds)
            set_log_fields(before)

    return logged


def _log_end(code: str, seconds: float) -> None:
    routine = code in ("OK", "CANCELLED") and "request_id" not in log_fields()
    log = _log.bound()
    write = log.debug if routine else log.info
    write("call ended", code=code, seconds=round(seconds, 6))


def _code_name(context: Context) -> str:
    # Despite its type: None or 0 until a code is set, then an int or an enum.
    code: grpc.StatusCode | int | None = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _CODE_NAMES[code or 0]


def _abandoned_code_name(context: Context, seconds: float) -> str:
    """The status of an abandoned call: the caller cancelled it, or its deadline passed."""
    return "DEADLINE_EXCEEDED" if was_left_at_its_deadline(remaining_seconds(context), seconds) else "CANCELLED"


def identity(request: Any, context: Context) -> dict[str, str]:
    """The request's id, if it has one; in a GenerateUnaryRequest it is in the inner request.

    On a worker `request_id` is the client's id, and `call_id` the id that the router chose.
    """
    inner = request_within(request)
    if inner is None or not inner.request_id:
        return {}
    request_id: str = inner.request_id
    named = client_request_id(context)
    return {"request_id": named, "call_id": request_id} if named else {"request_id": request_id}


def request_within(message: Any) -> Any:
    """The message with the field request_id: a call's, or the one in its field `request`; None if it has none."""
    fields = _field_names(message.__class__)
    if "request_id" in fields:
        return message
    return message.request if "request" in fields and "request_id" in _field_names(message.request.__class__) else None


@cache  # asking a message for a field that it lacks takes longer
def _field_names(kind: type) -> frozenset[str]:
    descriptor = getattr(kind, "DESCRIPTOR", None)
    return frozenset(field.name for field in descriptor.fields) if descriptor else frozenset()
