"""Calls that may never return, in daemon threads."""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from runtime.threads import start_thread

Value = TypeVar("Value")


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
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
