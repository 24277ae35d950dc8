"""Tasks that last: an error is logged and counted, and the task goes on."""

import asyncio

import pytest
from structlog.testing import capture_logs
from support.clients.scraping import since

from runtime.aio import TaskGroup
from runtime.lasting import lasting


async def test_an_error_ends_neither_the_task_nor_its_siblings() -> None:
    failures = since("baton_task_failures_total", task="odd")
    begun = 0
    went_on = asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ZeroDivisionError("odd")
        went_on.set()

    with capture_logs() as lines:
        async with TaskGroup() as group:
            group.create_task(lasting("odd", work))
            await asyncio.wait_for(went_on.wait(), 20)
    assert failures.grown == 2
    assert [line["task"] for line in lines] == ["odd", "odd"]


async def test_what_is_to_be_raised_is_raised() -> None:
    async def work() -> None:
        raise PermissionError("not here")

    with pytest.raises(PermissionError):
        await lasting("odd", work, (PermissionError,))


async def test_cancelling_ends_it() -> None:
    task = asyncio.create_task(lasting("odd", asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
