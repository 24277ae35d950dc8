"""Waits with a deadline, on every supported Python, and ends of tasks that keep nothing alive."""

import asyncio
import sys
from typing import Any

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from taskgroup import timeout

__all__ = ["ended_with", "forget_frames", "timeout", "wait_until_done"]


async def wait_until_done(*tasks: "asyncio.Future[Any]") -> None:
    """Returns once all tasks have ended, however they end. Raises a cancellation only after that."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # Retrieved, so that asyncio does not log it as lost.
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        cancelled = None  # It refers to this frame.


def forget_frames(error: BaseException) -> None:
    """Frees the frames that an error, and those that led to it, have passed through. Call it where an error ends.

    What those frames know often refers to the error, or to the task that it has ended: only a garbage collection would
    free such a cycle, with the whole request in it.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            waiting += (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))


def ended_with(task: "asyncio.Future[Any]") -> BaseException | None:
    """The error that has ended a task, without its frames; None if it ended well."""
    try:
        task.result()  # A cancelled task keeps its error until it is asked.
    except BaseException as error:
        forget_frames(error)
        return error
    return None
