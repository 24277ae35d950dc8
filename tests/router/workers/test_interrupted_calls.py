"""Calls to a worker that is found to hang: they fail, and the task that made them goes on."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
from support.router.worker_views import worker as record_of

from baton.errors import Unavailable
from router.workers.handle import WorkerHandle
from rpc.channels import open_channel


@pytest.fixture
async def worker() -> AsyncIterator[WorkerHandle]:
    async with open_channel("127.0.0.1:1") as channel:
        yield WorkerHandle(record_of("w1"), channel, channel, lambda: None)


async def test_a_call_that_is_interrupted_is_unavailable_and_its_task_goes_on(worker: WorkerHandle) -> None:
    waiting = worker.calls.interruptible()

    async def serve() -> str:
        with pytest.raises(Unavailable, match="no response for 3"), waiting:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return "goes on"

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    worker.calls.interrupt(silent_seconds=3.0)
    assert await serving == "goes on"
    if sys.version_info >= (3, 11):
        assert serving.cancelling() == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations")
async def test_a_caller_that_leaves_as_its_worker_hangs_has_left(worker: WorkerHandle) -> None:
    waiting = worker.calls.interruptible()

    async def serve() -> None:
        with waiting:
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    worker.calls.interrupt(silent_seconds=3.0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
