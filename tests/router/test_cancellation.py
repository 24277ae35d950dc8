"""Stopping a request: what runs it, and the task that it runs in."""

import asyncio
import sys

import pytest

from baton.errors import Cancelled
from router.cancellation import Cancellation


async def test_a_stopped_request_leaves_its_task_to_answer_the_call() -> None:
    cancellation, began = Cancellation("call-1"), asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    async def serve() -> str:
        with pytest.raises(Cancelled, match="enough"):
            await cancellation.run(work())
        cancellation.close()
        await asyncio.sleep(0)
        return "answered"

    serving = asyncio.create_task(serve())
    await began.wait()
    assert await cancellation.cancel("enough") == []
    assert await serving == "answered"
    if sys.version_info >= (3, 11):
        assert serving.cancelling() == 0


async def test_a_caller_that_leaves_cancels_the_request_as_its_own_task() -> None:
    cancellation, began = Cancellation("call-1"), asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    serving = asyncio.create_task(cancellation.run(work()))
    await began.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
