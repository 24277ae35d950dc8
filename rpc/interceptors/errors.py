"""Ends a call that raised with the status of its error. The only broad `except` of a call."""

import asyncio
import sys
from typing import Any

import structlog
from grpc import aio

from baton.errors import BatonError
from baton_http2.server.methods import Behaviour, Context
from rpc.status import to_status
from runtime.aio import forget_frames, leaf_errors
from runtime.telemetry.logs import add_log_fields

log = structlog.get_logger(__name__)


def answer_errors(method: str, behaviour: Behaviour) -> Behaviour:
    """A BatonError becomes its status, also after messages were sent; any other error is logged, and INTERNAL.

    This includes gRPC's own errors, unless the call has ended: they may come from a call that the servicer made.
    """

    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            try:
                await _answer(method, error, context)
            finally:
                forget_frames(error)
        except asyncio.CancelledError as error:
            if not _has_leaked(context):
                raise
            await _answer(method, RuntimeError(f"unhandled cancellation of another task: {error!r}"), context)

    return guarded


def _has_leaked(context: Context) -> bool:
    """True if the cancellation is not of the serving task itself. gRPC would leave the call without a status.

    Python 3.10 cannot tell.
    """
    if sys.version_info < (3, 11):
        return False
    task = asyncio.current_task()
    return task is not None and not task.cancelling() and not context.cancelled()


async def _answer(method: str, error: Exception, context: Context) -> None:
    """Ends the call with the status of `error`. Raises the exception that gRPC expects."""
    found = leaf_errors(error)
    for cause in found:
        if isinstance(cause, aio.AbortError) or (isinstance(cause, aio.BaseError) and context.cancelled()):
            # The call already has its status, or the caller is gone.
            raise cause
    known = [cause for cause in found if isinstance(cause, BatonError)]
    if len(known) == len(found):
        await _abort(context, known[0])
        return
    try:
        await _abort(context, BatonError("internal error"))
    finally:
        # Only now is it certain whether a write failed because the peer left.
        if not (context.cancelled() and any(isinstance(cause, aio.BaseError) for cause in found)):
            log.error("call failed", method=method, exc_info=error)


async def _abort(context: Context, error: BatonError) -> None:
    status = to_status(error)
    add_log_fields(reason=error.reason, error=status.details)
    # The servicer's trailing metadata is sent with the error too.
    trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
    await context.abort(status.code, status.details, trailing)
