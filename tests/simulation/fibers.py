"""Threads of a world: code that blocks, of which one piece runs at a time, while the event loop waits for it."""

import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any, ClassVar

from simulation.entropy import Time


class Fiber:
    """A thread that runs only within `resume`, and stops where it would block, in `pause`. What it starts with is its
    context, which says whose process it is. One that is never resumed again is lost, as the thread of a killed process.
    """

    current: "ClassVar[Fiber | None]" = None

    def __init__(self, loop: Any, context: Context, work: Callable[[], object]) -> None:
        self._loop, self._context, self._work = loop, context, work
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self.is_over = False

    def resume(self) -> None:
        """Runs it until it would block, or ends."""
        if self.is_over:
            return
        before, running, Fiber.current = Fiber.current, self._loop.current, self
        if self._thread is None:
            self._thread = threading.Thread(target=self._context.run, args=[self._main], daemon=True)
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        Fiber.current, self._loop.current = before, running

    def _main(self) -> None:
        try:
            self._work()
        finally:
            self.is_over = True
            self._back.release()

    def pause(self) -> None:
        """Waits to be resumed. Called by itself."""
        self._back.release()
        self._turn.acquire()

    def wait_until(self, is_done: Callable[[], Any], seconds: float | None) -> Any:
        """Waits until `is_done()` is true or so long has passed, asking when it is resumed. Returns the last value."""
        due = None if seconds is None else Time.now + seconds
        while not (found := is_done()) and (due is None or Time.now < due):
            timer = None if due is None else self._loop.call_at(due, self.resume, context=self._context.copy())
            self.pause()
            if timer is not None:
                timer.cancel()
        return found
