"""What a worker's process does once it serves: look after it until it may end, or has to."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any

import structlog

from rpc.errors import EngineFailed
from rpc.settle import do_while, settle
from services.host import Worker

log = structlog.get_logger(__name__)

_FAREWELL_SECONDS = 5.0


async def attend(worker: Worker, stopping: asyncio.Event) -> None:
    """Returns when it is to stop, or has been drained. Raises EngineFailed once its engine is not healthy.

    Whoever calls it is to end the process then, in good order; what hangs in a broken engine cannot be waited for, so
    that a few seconds later the process ends in any case, with exit code 1.
    """
    try:
        await do_while(worker.supervise(), _first(stopping.wait(), worker.drainer.finished()))
    except EngineFailed:
        farewell = threading.Timer(_FAREWELL_SECONDS, _end)
        farewell.daemon = True
        farewell.start()
        raise


async def _first(*ends: Coroutine[Any, Any, Any]) -> None:
    """Waits for the first of several."""
    waiting = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await settle(*waiting)


def _end() -> None:
    log.error("the engine does not end; the process does")
    os._exit(1)
