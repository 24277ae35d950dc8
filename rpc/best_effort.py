"""Calls that may fail: something else, such as the end of a lease, does their work later."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
from grpc import aio

from baton.calls import unary
from baton.errors import BatonError
from rpc.timeouts import BEST_EFFORT_SECONDS, BEST_EFFORT_UNHEALTHY_SECONDS

log = structlog.get_logger(__name__)

Response = TypeVar("Response")


async def best_effort(
    start: "Callable[[float], aio.UnaryUnaryCall[Any, Response]]", *, healthy: bool
) -> Response | None:
    """The response of `start(timeout_seconds)`, a unary call; None if the peer fails or does not answer in time.

    A peer that is not healthy gets less time. A cancelled caller still waits for the response, at most as long, and is
    cancelled then.
    """
    seconds = BEST_EFFORT_SECONDS if healthy else BEST_EFFORT_UNHEALTHY_SECONDS
    try:
        # Within: the start of a call on a channel that is closed fails at once.
        calling = asyncio.ensure_future(unary(start(seconds)))
        return await asyncio.shield(calling)
    except BatonError as error:
        log.debug("best-effort call failed", error=error.message)
        return None
    except asyncio.CancelledError:
        await asyncio.wait([calling], timeout=seconds)
        if calling.done() and not calling.cancelled():
            calling.exception()  # Retrieved, so that asyncio does not log it as lost.
        raise
