"""Slow work in a thread, with a deadline and a bounded queue, so that the event loop never waits for it."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.errors import InvalidRequest, Overloaded

Result = TypeVar("Result")

_RETRY_SECONDS = 1.0


class GrammarThread:
    """Compiles and checks grammars, one after the other. `close` ends the thread when its work is done.

    A thread cannot be stopped: work that exceeds `seconds` goes on, within the limits of the compiler, while its caller
    already has the error.
    """

    def __init__(self, seconds: float = 10.0, max_waiting: int = 256) -> None:
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._waiting = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Returns the result of `work`. Raises what it raises, Overloaded if too much waits, and InvalidRequest if it
        takes too long.
        """
        if self._waiting >= self._max_waiting:
            raise _overloaded(f"{self._waiting} grammars are waiting to be compiled already")
        began = threading.Event()

        def begin() -> Result:
            began.set()
            return work()

        self._waiting += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self._thread, begin)
            done, _ = await asyncio.wait([future], timeout=self._seconds)
        finally:
            self._waiting -= 1
        if done:
            return future.result()
        future.cancel()
        if not began.is_set():
            raise _overloaded("compiling other grammars takes too long")
        raise InvalidRequest.of("guided", f"takes more than {self._seconds:g} s to compile")

    def close(self) -> None:
        """Drops the work that has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _overloaded(text: str) -> Overloaded:
    return Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
