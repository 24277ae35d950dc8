"""The engine's thread: it takes commands from a queue, and delivers the outcomes of a step in one event loop call."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import structlog
import torch
from typing_extensions import Self

from baton.errors import BatonError, DeviceFailed, EngineFailed
from runtime.aio import retrieved
from services.engines.base import EngineLoad
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.failures import StallDetector, failure_of
from services.engines.pytorch.model.loading import use_device
from services.engines.pytorch.parallel.ranks import RankLost

_log = structlog.get_logger(__name__)

T = TypeVar("T")
Outcome = Callable[[], None]

# Of the time for which the thread waited for the device in the last step, it may let the event loop run first.
_HANDED_OVER_SHARE = 0.75
_LEAST_SECONDS = 0.0001


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """A command for the thread, to run between two steps, and the future of its result."""

    run: Callable[[EngineCore], T]
    result: "asyncio.Future[T]"


class EngineLoop:
    """Runs an EngineCore on a thread while the context is open.

    `healthy` becomes false when the thread ends: then every waiting and later call fails. It is also false while the
    thread hangs; only the end of the process helps then.
    """

    def __init__(self, core: EngineCore, threads: int | None, stall_detector: StallDetector) -> None:
        self._core = core
        self._stall_detector = stall_detector
        self._threads = threads
        self._commands: queue.SimpleQueue[Command[Any] | None] = queue.SimpleQueue()
        self._outcomes: list[Outcome] = []
        self._gate = threading.Lock()
        self._failure: BatonError | None = None
        self._current: Command[Any] | None = None  # the latest
        self._delivered = threading.Event()
        self._thread = threading.Thread(target=self._main, name="baton-engine", daemon=True)
        self.load: EngineLoad = core.load()
        core.steps.before_freeing = self._tell

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def healthy(self) -> bool:
        """True if the thread runs and does not hang."""
        return self._failure is None and not self._stall_detector.is_stuck

    @property
    def quiet_seconds(self) -> float:
        """The time since the thread's last progress."""
        return self._stall_detector.quiet_seconds

    async def call(self, run: Callable[[EngineCore], T]) -> T:
        """Runs `run` between two steps, even if the caller is cancelled meanwhile."""
        return await asyncio.shield(retrieved(self.post(run)))

    async def run_shielded(self, run: Callable[[EngineCore], int]) -> int:
        """Like `call`, but not interrupted by a cancellation. Returns 0 if the engine has ended, and all blocks with
        it.
        """
        try:
            result = self.post(run)
        except EngineFailed:
            return 0
        cancelled = False
        while not result.done():
            try:
                await asyncio.wait([result])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return 0 if isinstance(result.exception(), EngineFailed) else result.result()

    def notify(self, outcome: Outcome) -> None:
        """Calls `outcome` in the event loop after this step. For the engine's thread only."""
        self._outcomes.append(outcome)

    def post(self, run: Callable[[EngineCore], T]) -> "asyncio.Future[T]":
        """Has `run` run between two steps. Raises EngineFailed if the engine has ended."""
        command = Command(run, self._loop.create_future())
        with self._gate:
            if self._failure is not None:
                raise self._failure
            self._commands.put(command)
        return command.result

    def _main(self) -> None:
        failure: BatonError = EngineFailed("the engine's thread has ended")
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            use_device(self._core.memory.tensor.device)
            with torch.inference_mode():
                self._run()
            failure = EngineFailed("the engine has been closed")
        except RuntimeError as error:  # PyTorch raises it for almost every failure
            _log.error("engine failed", error=str(error), exc_info=True)
            failure = failure_of("engine", error)
            if isinstance(error, RankLost):
                self._core.end_with_ranks()
            if isinstance(failure, DeviceFailed):
                self._core.distrust_memory()
        finally:
            self._end(failure)

    def _run(self) -> None:
        """Steps while there is work; otherwise waits for a command."""
        busy = False
        while self._obey(wait=not busy):
            with self._stall_detector.beating():
                busy = self._core.steps.step()
            self._publish()

    def _obey(self, *, wait: bool) -> bool:
        """Runs the queued commands, or the next one to arrive in time. Returns False if one of them
        stops the thread.
        """
        while wait or not self._commands.empty():
            try:
                command = self._commands.get(timeout=self._core.steps.patience_seconds if wait else 0)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._execute(command)
            wait = False
        return True

    def _execute(self, command: Command[Any]) -> None:
        self._current = command
        try:
            with self._stall_detector.beating():
                value = command.run(self._core)
        except BatonError as error:
            self.notify(partial(_set_error, command.result, error))
        else:
            self.notify(partial(_set_result, command.result, value))

    def _publish(self) -> None:
        """Delivers the outcomes of a step. The load is set first, so that a caller sees the blocks that became free."""
        self.load = self._core.load()
        self._tell()

    def _tell(self) -> None:
        """Delivers the outcomes that there are."""
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._delivered.clear()
            self._loop.call_soon_threadsafe(self._deliver, outcomes)
            self._hand_over()

    def _hand_over(self) -> None:
        """Waits until the event loop has told the clients, for less than this thread would wait for the device anyway.

        Otherwise both would want the interpreter now, and what this thread does with it before the next step differs
        from one to the other: the clients would see that, however even the steps are.
        """
        seconds = _HANDED_OVER_SHARE * self._core.steps.spare_seconds
        if seconds > _LEAST_SECONDS:
            self._delivered.wait(seconds)

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            outcome()
        self._loop.call_soon(self._delivered.set)  # after those that the outcomes have woken

    def _end(self, failure: BatonError) -> None:
        with self._gate:
            self._failure = failure
        if self._current is not None:  # perhaps the one that has ended the thread
            self.notify(partial(_set_error, self._current.result, failure))
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                self.notify(partial(_set_error, command.result, failure))
        self._core.fail_all(failure)
        self._publish()


def _set_result(future: "asyncio.Future[Any]", value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_error(future: "asyncio.Future[Any]", error: BatonError) -> None:
    if not future.done():
        future.set_exception(error)
