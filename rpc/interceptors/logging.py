"""Gives every log line of a call its request id, and writes one line at the call's end."""

import time
from typing import Any

import grpc
import structlog
from grpc import aio

from rpc.interceptors.behaviour import Behaviour, Context

log = structlog.get_logger(__name__)

_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def log_call(method: str, behaviour: Behaviour) -> Behaviour:
    """Binds request_id and method for the time of the call, and logs its status code and seconds.

    Calls that belong to no request and did not fail (health, load, leases) are logged at debug: there are many.
    """

    async def logged(request: Any, context: Context) -> Any:
        started = time.monotonic()
        with structlog.contextvars.bound_contextvars(method=method, **identity(request)):
            ended = False
            try:
                response = await behaviour(request, context)
                ended = True
                return response
            except aio.AbortError:
                ended = True
                raise
            finally:
                code = _code_name(context) if ended else _abandoned_code_name(context)
                _log_end(code, time.monotonic() - started)

    return logged


def _log_end(code: str, seconds: float) -> None:
    routine = code in ("OK", "CANCELLED") and "request_id" not in structlog.contextvars.get_contextvars()
    write = log.debug if routine else log.info
    write("call ended", code=code, seconds=round(seconds, 6))


def _code_name(context: Context) -> str:
    # Whatever its stubs say: None or 0 until somebody sets or aborts with a code, and then an int or an enum.
    code: grpc.StatusCode | int | None = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _CODE_NAMES[code or 0]


def _abandoned_code_name(context: Context) -> str:
    """Why nobody waits for the answer: the caller has left, or its time is over."""
    return "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"


def identity(request: Any) -> dict[str, str]:
    """The request's id, if it has one; a GenerateUnaryRequest has it one level down."""
    inner = getattr(request, "request", request)
    request_id = getattr(inner, "request_id", "")
    return {"request_id": request_id} if request_id else {}
