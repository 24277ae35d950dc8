"""Calls of TensorRT-LLM that may never return, in threads that the end of the process does not wait for."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

Value = TypeVar("Value")


def detached(call: Callable[[], Value], name: str) -> "asyncio.Future[Value]":
    """Begins the call at once. What it answers, or raises, is the future's; cancelling that does not end the call."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Value] = loop.create_future()
    threading.Thread(target=_Call(call, loop, answer).run, name=name, daemon=True).start()
    return answer


class _Call(Generic[Value]):
    """A context manager too: whatever ends the call, its future hears of it."""

    def __init__(
        self, call: Callable[[], Value], loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Value]"
    ) -> None:
        self._call = call
        self._loop = loop
        self._answer = answer

    def run(self) -> None:
        with self:
            value = self._call()
            self._tell(lambda: self._answer.set_result(value))

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            failed = error
            self._tell(lambda: self._answer.set_exception(failed))
        return True

    def _tell(self, settle: Callable[[], None]) -> None:
        def unless_cancelled() -> None:
            if not self._answer.done():
                settle()

        # The loop may have ended by then, and nobody wants to know any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(unless_cancelled)
