"""Waiting that cannot be interrupted, for what must have ended before anything else may happen."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def settle(*tasks: "asyncio.Future[Any]") -> None:
    """Returns once all tasks have ended, however they end. A cancellation meanwhile is raised then, not before."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # Looked at, so that asyncio does not complain of it.
    if cancelled is not None:
        raise cancelled


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is not cancelled whatever happens to the caller."""
    task = asyncio.ensure_future(work)
    await settle(task)
    return task.result()


async def do_while(keeping: Coroutine[Any, Any, None], work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, with `keeping` running beside it; if `keeping` ends first, its error is raised.

    Both have ended when this returns or raises, also when it is cancelled.
    """
    keeper, worker = asyncio.ensure_future(keeping), asyncio.ensure_future(work)
    try:
        await asyncio.wait((keeper, worker), return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = worker.done()
        keeper.cancel()
        worker.cancel()
        await settle(keeper, worker)
    if not finished:
        keeper.result()
    return worker.result()
