"""Structured concurrency for asyncio, on every supported Python, and waits that a cancellation does not interrupt."""

import asyncio
import math
import sys
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from baton_http2.aio import ended_with, forget_frames, timeout, wait_until_done

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup, Timeout
else:
    from taskgroup import TaskGroup, Timeout

__all__ = [
    "TaskGroup",
    "Timeout",
    "cancellations",
    "ended_with",
    "forget_cancellation",
    "forget_frames",
    "gather_or_cancel",
    "gather_to_completion",
    "leaf_errors",
    "retrieved",
    "run_to_completion",
    "run_with_background",
    "sleep_together",
    "timeout",
    "uncancel",
    "ungrouped",
    "wait_until_done",
]

Result = TypeVar("Result")
Work = TypeVar("Work", bound="asyncio.Future[Any]")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of coroutines that run concurrently, in their order.

    The first failure, or a cancellation, cancels the others, waits for them, and is raised. Unlike a TaskGroup it does
    not wrap the error in a group.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        try:
            await _cancel_all(tasks)
        finally:
            # An error that is raised has this frame, and its task has the error.
            tasks.clear()


async def _cancel_all(tasks: "Sequence[asyncio.Future[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_to_completion(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The same, but all of them run to their ends before a failure is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks, return_exceptions=True)
        return await asyncio.gather(*tasks)
    finally:
        tasks.clear()


async def run_to_completion(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which ends even if the caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await wait_until_done(task)
        return task.result()
    finally:
        del task  # its error has this frame


async def run_with_background(background: Coroutine[Any, Any, None], work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, with `background` running beside it; if `background` ends first, its error is raised.

    Both have ended when this returns or raises, also when it is cancelled.
    """
    beside, main = asyncio.ensure_future(background), asyncio.ensure_future(work)
    try:
        await asyncio.wait((beside, main), return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_finished = main.done()
        beside.cancel()
        main.cancel()
        await wait_until_done(beside, main)
    try:
        if not is_finished:
            beside.result()
        return main.result()
    finally:
        del beside, main  # their errors have this frame


async def sleep_together(seconds: float, every: float) -> None:
    """Sleeps for so long, and up to `every` longer, until a time that is the same for all that sleep so.

    Many that wait for times of their own would wake an idle process for each of them.
    """
    now = asyncio.get_running_loop().time()
    await asyncio.sleep(math.ceil((now + seconds) / every) * every - now)


if sys.version_info >= (3, 11):
    cancellations = asyncio.Task.cancelling
    """The number of cancellations of a task, less `uncancel`."""
else:

    def cancellations(task: "asyncio.Task[Any]") -> int:
        """0: Python 3.10 does not count them."""
        del task
        return 0


def uncancel(task: "asyncio.Task[Any]") -> int:
    """Takes one cancellation back that has ended what it was to end. Returns those left, as `cancellations` does."""
    if sys.version_info >= (3, 11):
        return task.uncancel()
    return 0


def forget_cancellation(task: "asyncio.Future[Any]") -> None:
    """Frees the frames of a task that was cancelled, which it keeps until it is asked. A callback for its end."""
    if task.cancelled():
        ended_with(task)


def retrieved(work: Work) -> Work:
    """The same: asyncio does not log its error as lost if it comes when those that waited have left."""
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return work


def leaf_errors(error: BaseException) -> list[BaseException]:
    """The errors that task groups wrapped into `error`, at any depth; `error` itself if it is not a group."""
    inner: tuple[BaseException, ...] | None = getattr(error, "exceptions", None)
    if inner is None:
        return [error]
    return [leaf for one in inner for leaf in leaf_errors(one)]


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raises the one error of the body as itself, where task groups wrapped it on its way; several stay a group."""
    try:
        yield
    except Exception as error:
        leaves = leaf_errors(error)
        if leaves[0] is error or len({(type(leaf), str(leaf)) for leaf in leaves}) > 1:
            raise
        raise leaves[0] from None
