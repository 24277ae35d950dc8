"""Calls to a worker that is found to hang: they fail, and the task that made them goes on."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable

import pytest
from support.router.worker_views import worker as record_of

from baton.errors import Unavailable, WorkerTimeout
from discovery.registry import WorkerRecord
from router.workers.cancellation import Cancellation
from router.workers.handle import WorkerHandle
from router.workers.watching.waiting_calls import Waiting
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


async def test_a_worker_that_was_chosen_before_it_left_takes_no_request_on_a_channel_that_closes(
    worker: WorkerHandle,
) -> None:
    request = Cancellation("one")
    request.add_worker(worker)
    leaving = asyncio.create_task(worker.idle())
    await asyncio.sleep(0)
    request.close()
    another = Cancellation("another")
    another.add_worker(worker)  # in the turn in which the first one has ended
    await asyncio.sleep(0.01)
    assert not leaving.done()
    another.close()
    await leaving
    with pytest.raises(Unavailable, match="worker w1 has left"):
        Cancellation("a third").add_worker(worker)


class BegunAnswer(Waiting):
    """An answer that has begun, and may stand still for a minute while its client reads."""

    def __init__(self) -> None:
        self.is_read, self.tokens_until_now, self.others = True, 1, True

    def answer_seconds(self) -> float:
        return 10.0

    def silence_seconds(self) -> float:
        return 60.0 if self.is_read else 0.0

    def num_tokens(self) -> int:
        return self.tokens_until_now

    def another_can(self, worker: WorkerRecord) -> bool:
        return self.others


def is_given_up(worker: WorkerHandle, answer: BegunAnswer, seconds: float) -> bool:
    """True if the answer is given up when it is looked at again after so long, in which nothing is known to pass."""
    assert answer.asked_at is not None
    answer.asked_at -= seconds
    worker.calls.interrupt_unanswered()
    return not worker.calls._calls


def token_came(_worker: WorkerHandle, answer: BegunAnswer) -> None:
    answer.tokens_until_now += 1


def client_is_behind(_worker: WorkerHandle, answer: BegunAnswer) -> None:
    answer.is_read = False


def requests_wait(worker: WorkerHandle, _answer: BegunAnswer) -> None:
    worker.load.waiting = 1


def it_sleeps(worker: WorkerHandle, _answer: BegunAnswer) -> None:
    worker.wake_seconds = 60.0


def none_is_left(_worker: WorkerHandle, answer: BegunAnswer) -> None:
    answer.others = False


@pytest.mark.parametrize("reason", [token_came, client_is_behind, requests_wait, it_sleeps, none_is_left])
async def test_an_answer_that_stands_still_for_a_reason_is_waited_for(
    worker: WorkerHandle, reason: Callable[[WorkerHandle, BegunAnswer], None]
) -> None:
    answer = BegunAnswer()
    with worker.calls.interruptible(answer):
        worker.calls.interrupt_unanswered()
        worker.calls.interrupt_unanswered()
        reason(worker, answer)
        assert not is_given_up(worker, answer, 100.0)


async def test_a_pause_of_this_process_is_no_silence_of_its_workers(worker: WorkerHandle) -> None:
    answer = BegunAnswer()
    with worker.calls.interruptible(answer):
        worker.calls.interrupt_unanswered()
        worker.calls.interrupt_unanswered()
        worker.calls._looked_at -= 100.0
        assert not is_given_up(worker, answer, 100.0)


async def test_a_pause_of_this_process_is_no_wait_for_an_answer(worker: WorkerHandle) -> None:
    call = BegunAnswer()
    call.awaits_answer = True
    with worker.calls.interruptible(call):
        worker.calls.interrupt_unanswered()
        worker.calls._looked_at -= 100.0
        assert not is_given_up(worker, call, 100.0)
        assert is_given_up(worker, call, 100.0)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)


async def test_an_answer_that_stands_still_is_given_up_in_time(worker: WorkerHandle) -> None:
    answer = BegunAnswer()
    with pytest.raises(WorkerTimeout, match="no token for 150"):
        await stands_still(worker, answer)


async def stands_still(worker: WorkerHandle, answer: BegunAnswer) -> None:
    with worker.calls.interruptible(answer):
        worker.calls.interrupt_unanswered()
        assert not is_given_up(worker, answer, 50.0)
        assert is_given_up(worker, answer, 100.0)
        await asyncio.sleep(0)
