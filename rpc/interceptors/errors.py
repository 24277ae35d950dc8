"""Answers a call that raised with the status of its error. The one place that catches everything."""

from typing import Any

import structlog
from grpc import aio

from rpc.causes import causes
from rpc.errors import BatonError
from rpc.interceptors.behaviour import Behaviour, Context
from rpc.status import to_status

log = structlog.get_logger(__name__)


def answer_errors(method: str, behaviour: Behaviour) -> Behaviour:
    """A BatonError becomes its status, also after messages were sent; anything else is logged and INTERNAL."""

    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _abort(context, _to_answer(method, error))

    return guarded


def _to_answer(method: str, error: Exception) -> BatonError:
    found = causes(error)
    # gRPC's own: the call is aborted already, or its peer has gone. There is nobody to answer.
    for cause in found:
        if isinstance(cause, aio.BaseError):
            raise cause
    known = [cause for cause in found if isinstance(cause, BatonError)]
    if len(known) == len(found):
        return known[0]
    log.error("call failed", method=method, exc_info=error)
    return BatonError("internal error")


async def _abort(context: Context, error: BatonError) -> None:
    status = to_status(error)
    structlog.contextvars.bind_contextvars(reason=error.reason, error=status.details)
    # What a servicer wanted to say at the end is said also where it could not end.
    trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
    await context.abort(status.code, status.details, trailing)
