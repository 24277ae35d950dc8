"""The calls that wait for one worker. They are interrupted if it is found to hang, or does not answer for too long."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, Unavailable, WorkerTimeout
from discovery.registry import WorkerRecord
from runtime.aio import cancellations, uncancel
from runtime.clock import monotonic

# A worker may be busy with what it has: how much longer it may take to answer for each request that waits there, up to
# so many, and for each token that is computed before.
_MOST_WAITING = 8
_SLOW_TOKENS_PER_SECOND = 200.0
# Calls that are asked in one look whether another worker could answer them, which takes some time.
_ASKED_AT_ONCE = 16


class Waiting:
    """A request as a worker knows it that it has called: how long it waits for the answer.

    `awaits_answer` is set while it waits; `asked_at` is then None until it was looked at, `tokens` are what the call
    computes before it answers. Attributes, since requests set them with each call.
    """

    asked_at: float | None = None
    awaits_answer = False
    tokens = 0
    seen_tokens = -1  # of an answer that has begun, when it was last looked at

    def answer_seconds(self) -> float:
        """The seconds that an idle worker may take to answer."""
        raise NotImplementedError

    def silence_seconds(self) -> float:
        """The seconds that an answer which has begun may stand still; 0 while it may do so for ever."""
        return 0.0

    def num_tokens(self) -> int:
        """The tokens of the answer until now."""
        return 0

    def goes_on(self) -> bool:
        """True if the answer has begun, and has tokens that it had not when it was last looked at."""
        return not self.awaits_answer and 0 <= self.seen_tokens < self.num_tokens()

    def another_can(self, worker: WorkerRecord) -> bool:
        """True if another worker could answer instead of this one."""
        raise NotImplementedError

    def give_up(self) -> None:
        """The answer will not be read: whatever only serves it ends, without waiting for this worker."""


class InterruptibleCall:
    """The body of its `with` is stopped by `interrupt`, with the error that this is given.

    Not an asyncio.timeout, which makes twice the calls: each request has two.
    """

    __slots__ = ("_calls", "_cancelled_before", "_error", "_task", "waiting")

    _task: "asyncio.Task[Any]"
    _cancelled_before: int

    def __init__(self, calls: "dict[InterruptibleCall, None]", waiting: Waiting | None) -> None:
        self.waiting = waiting
        self._calls = calls
        self._error: BatonError | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelled_before = task, cancellations(task)
        self._calls[self] = None

    def interrupt(self, error: BatonError) -> None:
        """Stops the body, which then raises `error`; not one that is cancelled as well."""
        self._calls.pop(self, None)
        self._error = error
        self._task.cancel()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._calls.pop(self, None)
        if self._error is None or uncancel(self._task) > self._cancelled_before:
            return
        if isinstance(error, asyncio.CancelledError):
            raise self._error from None


@dataclass(frozen=True, slots=True)
class Backlog:
    """The requests that wait for a worker, as it reported, the prompt tokens, and the time until it is awake."""

    record: WorkerRecord
    requests: int
    tokens: int
    wake_seconds: float


class WaitingCalls:
    """The calls that wait for a worker, beside its `backlog`."""

    def __init__(self, backlog: Callable[[], Backlog]) -> None:
        self._backlog = backlog
        self._calls: dict[InterruptibleCall, None] = {}
        self._looked_at, self._unseen_seconds = monotonic(), 0.0

    def interruptible(self, waiting: Waiting | None = None) -> InterruptibleCall:
        """A call whose body is stopped with Unavailable if the worker is found to hang.

        With `waiting` it raises WorkerTimeout if there is no answer for too long, and another worker could give it.
        """
        return InterruptibleCall(self._calls, waiting)

    def interrupt(self, silent_seconds: float) -> None:
        """Stops all calls: they may continue elsewhere."""
        for call in tuple(self._calls):
            call.interrupt(Unavailable(f"no response for {silent_seconds:.1f} s"))

    def go_on(self) -> bool:
        """True if an answer has tokens that it had not when it was last looked at: the worker does not hang."""
        return any(call.waiting is not None and call.waiting.goes_on() for call in self._calls)

    def interrupt_unanswered(self) -> None:
        """Stops calls that have waited too long for their answers, and that another worker could answer."""
        now = monotonic()
        usual_seconds, unseen_seconds = self._unseen_seconds, now - self._looked_at
        self._unseen_seconds, self._looked_at = unseen_seconds, now
        if not self._calls:
            return
        left, backlog = _ASKED_AT_ONCE, self._backlog()
        for call in tuple(self._calls):
            waiting = call.waiting
            if waiting is None:
                continue
            if waiting.awaits_answer:
                patience_seconds = _patience_seconds(waiting, backlog)
                if waiting.asked_at is not None and unseen_seconds > max(patience_seconds, 2 * usual_seconds):
                    waiting.asked_at = now  # this process has stood still, and the answer may be there unread
            elif not (patience_seconds := _silence_seconds(waiting, backlog, unseen_seconds)):
                waiting.asked_at = None
            if waiting.asked_at is None:
                waiting.asked_at = now
            elif now > waiting.asked_at + patience_seconds and left:
                left -= 1
                if waiting.another_can(backlog.record):
                    what = "answer" if waiting.awaits_answer else "token"
                    call.interrupt(WorkerTimeout(f"no {what} for {now - waiting.asked_at:.1f} s"))
                else:
                    waiting.asked_at = now  # looked at again after as long


def _patience_seconds(waiting: Waiting, backlog: Backlog) -> float:
    """The seconds in which a worker that is well has answered, as far as can be told from what waits there."""
    tokens = waiting.tokens + min(backlog.tokens, _MOST_WAITING * max(waiting.tokens, 1024))
    requests = min(backlog.requests, _MOST_WAITING)
    return waiting.answer_seconds() * (1 + requests) + tokens / _SLOW_TOKENS_PER_SECOND + backlog.wake_seconds


def _silence_seconds(waiting: Waiting, backlog: Backlog, unseen_seconds: float) -> float:
    """The seconds that an answer may stand still on a worker that is well; 0 if it does not stand still.

    One that was preempted stands still while requests wait there.
    """
    before, waiting.seen_tokens = waiting.seen_tokens, waiting.num_tokens()
    seconds = waiting.silence_seconds()
    # After a pause of this process nothing is known of what has come meanwhile.
    if waiting.seen_tokens != before or not seconds or backlog.requests or 2 * unseen_seconds > seconds:
        return 0.0
    return seconds + backlog.wake_seconds
