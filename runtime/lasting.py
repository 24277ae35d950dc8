"""Tasks that last as long as their process: an error in one ends neither the others nor the process."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import structlog

from runtime.aio import TaskGroup
from runtime.telemetry.metrics import counter

log = structlog.get_logger(__name__)

FAILURES = counter(
    "baton_task_failures_total",
    "Errors that ended a task that lasts as long as its process, and that was started again.",
    ["task"],
)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
# A task that has run for so long pauses as briefly as at first.
_LASTED_SECONDS = 60.0


async def lasting(task: str, work: Callable[[], Awaitable[None]], raised: tuple[type[Exception], ...] = ()) -> None:
    """Runs `work` until it returns or is cancelled; again, after a growing pause, if it raises. Errors of the classes
    `raised` are raised.

    What a peer sends is checked where it is read; this is for what was not thought of. `task` names it in the log and
    in the metric.
    """
    loop = asyncio.get_running_loop()
    pause = _FIRST_PAUSE_SECONDS
    while True:
        started = loop.time()
        try:
            return await work()
        except raised:
            raise
        except Exception:
            FAILURES.labels(task).inc()
            log.exception("a task has failed and is started again", task=task)
        if loop.time() - started > _LASTED_SECONDS:
            pause = _FIRST_PAUSE_SECONDS
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


@asynccontextmanager
async def lasting_tasks(works: Mapping[str, Callable[[], Awaitable[None]]]) -> AsyncIterator[None]:
    """Runs each work as a lasting task of its name while the context is open."""
    async with TaskGroup() as group:
        tasks = [group.create_task(lasting(task, work)) for task, work in works.items()]
        try:
            yield
        finally:
            for running in tasks:
                running.cancel()
