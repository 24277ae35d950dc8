"""Threads that are not of a pool, and the interpreter that all threads share.

Threads of pools are started by the event loop, `run_in_executor` and `to_thread`.

Calls that may never return, in daemon threads.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Final, Generic, TypeVar

Value = TypeVar("Value")

# How long Python code holds the interpreter while the event loop waits for it; by default 5 ms.
_SWITCH_SECONDS: Final = 0.001
_CALLS_A_TURN: Final = 32
_IDS_A_TURN: Final = 32 * 1024
# Working on more ids takes the event loop over a millisecond.
MANY_IDS: Final = 16 * 1024
_calls = count(1)


def start_thread(call: Callable[..., Any], *arguments: Any, name: str) -> threading.Thread:
    """Runs a call in a thread of its own, which does not delay the end of the process."""
    thread = threading.Thread(target=call, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def switch_often() -> None:
    """Has Python code in threads let the event loop run after a millisecond."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def let_others_run(value: Value) -> Value:
    """The value. For compiled code that calls it for each of many: at some calls other threads may run.

    Not on an event loop, which would wait a millisecond each time for the interpreter of a thread that computes.
    """
    if not next(_calls) % _CALLS_A_TURN and not _is_on_loop():
        time.sleep(0)
    return value


def in_pieces(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Slices of token ids, between which other threads may run: of a message, a million at once take 40 ms."""
    for start in range(0, len(ids), _IDS_A_TURN):
        yield ids[start : start + _IDS_A_TURN]


async def of_many(count: int, work: Callable[[], Value]) -> Value:
    """Calls `work`, which looks at so many token ids: if they are many, in a thread, beside the event loop."""
    return work() if count <= MANY_IDS else await asyncio.to_thread(work)


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def daemon_call(call: Callable[[], Value], name: str) -> "asyncio.Future[Value]":
    """Runs a call that may never return in a daemon thread, which does not delay the end of the process.

    The future has its result or exception. Cancelling the future does not end the call.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Value] = loop.create_future()
    start_thread(_Call(call, loop, answer).run, name=name)
    return answer


class _Call(Generic[Value]):
    """A context manager, so that every exception of the call reaches the future."""

    def __init__(
        self, call: Callable[[], Value], loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Value]"
    ) -> None:
        self._call = call
        self._loop = loop
        self._answer = answer

    def run(self) -> None:
        with self:
            value = self._call()
            self._post(lambda: self._answer.set_result(value))

    def __enter__(self) -> None:
        """Required of a context manager."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            failed = error
            self._post(lambda: self._answer.set_exception(failed))
        return True

    def _post(self, set_outcome: Callable[[], None]) -> None:
        def unless_cancelled() -> None:
            if not self._answer.done():
                set_outcome()

        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(unless_cancelled)
