"""Stopping a request: what runs it, and the task that it runs in."""

import asyncio
import sys

import pytest

from baton.errors import Cancelled
from router.workers.cancellation import Cancellation


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


async def test_a_request_that_was_stopped_before_it_began_does_not_run() -> None:
    cancellation, has_begun = Cancellation("call-1"), False

    async def work() -> None:
        nonlocal has_begun
        has_begun = True

    stopping = asyncio.create_task(cancellation.cancel("enough"))
    await asyncio.sleep(0)
    with pytest.raises(Cancelled, match="enough"):
        await cancellation.run(work())
    cancellation.close()
    assert await stopping == []
    assert not has_begun


async def test_stopping_a_request_again_does_not_interrupt_its_end() -> None:
    cancellation, began, ending = Cancellation("call-1"), asyncio.Event(), asyncio.Event()
    has_ended = False

    async def work() -> None:
        nonlocal has_ended
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            for _ in range(20):
                await asyncio.sleep(0)
            has_ended = True

    async def serve() -> None:
        with pytest.raises(Cancelled):
            await cancellation.run(work())
        cancellation.close()

    serving = asyncio.create_task(serve())
    await began.wait()
    first = asyncio.create_task(cancellation.cancel("enough"))
    await ending.wait()
    second = asyncio.create_task(cancellation.cancel("really"))
    await asyncio.gather(first, second, serving)
    assert has_ended
    if sys.version_info >= (3, 11):
        assert serving.cancelling() == 0


class _Hung:
    """A shared call whose worker does not answer."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def stop(self, leaving: int) -> None:
        self.is_asked.set()
        await asyncio.Event().wait()


async def test_a_request_is_stopped_though_its_stopper_leaves_before_a_worker_answers() -> None:
    cancellation, began, hung = Cancellation("call-1"), asyncio.Event(), _Hung()

    async def work() -> None:
        with cancellation.waiting_for(hung):
            began.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(cancellation.run(work()))
    await began.wait()
    stopping = asyncio.create_task(cancellation.cancel("enough"))
    await hung.is_asked.wait()
    stopping.cancel()
    await asyncio.wait([serving], timeout=10.0)
    with pytest.raises(Cancelled, match="enough"):
        serving.result()
    assert stopping.cancelled()


async def test_a_request_is_stopped_when_its_time_is_over_and_its_task_goes_on() -> None:
    async def serve() -> str:
        with pytest.raises(TimeoutError):
            await Cancellation("call-1").run(asyncio.Event().wait(), 0.01)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return "answered"

    serving = asyncio.create_task(serve())
    assert await serving == "answered"
    if sys.version_info >= (3, 11):
        assert serving.cancelling() == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations")
async def test_a_caller_that_leaves_while_the_request_ends_is_told_that_it_left() -> None:
    cancellation, ending = Cancellation("call-1"), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(cancellation.run(work(), 0.01))
    await ending.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_a_request_that_ends_in_time_is_not_stopped_later() -> None:
    async def serve() -> None:
        await Cancellation("call-1").run(asyncio.sleep(0), 0.01)
        await asyncio.sleep(0.05)

    await asyncio.wait_for(asyncio.create_task(serve()), 10.0)


async def test_time_that_is_over_does_not_interrupt_a_request_that_was_stopped() -> None:
    cancellation, began = Cancellation("call-1"), asyncio.Event()
    has_ended = False

    async def work() -> None:
        nonlocal has_ended
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            has_ended = True

    async def serve() -> None:
        with pytest.raises(Cancelled, match="enough"):
            await cancellation.run(work(), 0.05)
        cancellation.close()

    serving = asyncio.create_task(serve())
    await began.wait()
    await cancellation.cancel("enough")
    await serving
    assert has_ended
