"""An event loop in virtual time, whose callbacks belong to nodes: simulated processes that may be killed and paused."""

import asyncio
import contextvars
import heapq
import random
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from types import BuiltinFunctionType
from typing import Any

from simulation.entropy import Time
from simulation.fibers import Fiber

NODE: "ContextVar[Node | None]" = ContextVar("node", default=None)
# How late a timer may be.
_LATE = 1e-4


class Deadlock(Exception):
    """Nothing is ready, and no timer is set."""


class _Future(asyncio.Future):
    """Hashed by a number, so that sets of futures iterate in the same order in every run. Few are ever hashed."""

    _number = 0

    def __hash__(self) -> int:
        self._number = self._number or self.get_loop().next_number()  # type: ignore[attr-defined]  # ours
        return self._number


class _Handle:
    """A handle like asyncio's, for a loop of one thread that is never in debug mode: it checks neither."""

    __slots__ = ("arguments", "callback", "context", "is_cancelled")

    def __init__(self, callback: Callable[..., object], arguments: Any, context: Context | None) -> None:
        self.callback, self.arguments, self.is_cancelled = callback, arguments, False
        self.context = copy_context() if context is None else context

    def cancelled(self) -> bool:
        return self.is_cancelled

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled, self.arguments, self.callback = True, (), _nothing


class _Timer(_Handle):
    __slots__ = ("_loop", "_when")

    def __init__(
        self, loop: "SimulatedLoop", when: float, callback: Callable[..., object], arguments: Any, context: Any
    ) -> None:
        self._loop, self._when = loop, when
        self.callback, self.arguments, self.is_cancelled = callback, arguments, False
        self.context = copy_context() if context is None else context

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        if not self.is_cancelled:
            self._loop.cancelled_timers += 1
            self.is_cancelled, self.arguments, self.callback = True, (), _nothing


def _nothing() -> None:
    """In the place of what was cancelled."""


class _Task(asyncio.Task):
    def __init__(self, coro: Any, *, loop: "SimulatedLoop", name: str | None = None, context: Any = None) -> None:
        self._number = loop.next_number()
        super().__init__(coro, loop=loop, name=name or f"t{self._number}", context=context)

    def __hash__(self) -> int:
        return self._number


class Node:
    """A simulated process. What it starts inherits its context. No `finally` of a killed node runs: its tasks stay
    referenced, and their callbacks are dropped.
    """

    def __init__(self, loop: "SimulatedLoop", name: str, ip: str, generation: int) -> None:
        self.loop, self.name, self.ip, self.generation = loop, name, ip, generation
        self.dead = self.paused = False
        self.held: list[_Handle] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task that belongs to this node."""
        return self.loop.create_task(coro, context=self.context())

    def context(self) -> contextvars.Context:
        """A context of this node."""
        context = contextvars.Context()
        context.run(NODE.set, self)
        return context

    def forget_done(self) -> None:
        """Lets go of tasks that have ended."""
        self.tasks = {one: None for one in self.tasks if not one.done()}

    def kill(self) -> None:
        """Nothing of it runs any more."""
        self.dead = True
        self.loop.graveyard += self.held
        self.held = []

    def resume(self) -> None:
        """Runs on from the next turn, with all that came meanwhile, in its order."""
        self.loop.resuming.append(self)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Jumps to the next timer when nothing is ready. Steps of tasks that are ready in one turn are shuffled."""

    def __init__(self, seed: int, turn_seconds: float) -> None:
        super().__init__()
        self._turn_seconds = turn_seconds
        self.random = random.Random(f"schedule-{seed}")
        self.network: Any = None
        self.current: Node | None = None
        self.graveyard: list[Any] = []
        self.errors: list[tuple[str, dict[str, Any]]] = []
        self._numbers = 0
        self.resuming: list[Node] = []
        self._readers: dict[Any, Callable[[], None]] = {}
        # Compared as tuples: a heap of handles would spend a tenth of all time on comparing them.
        self._timers: list[tuple[float, int, _Timer]] = []
        self.runs_in_fibers = False  # what other threads run may block
        self.cancelled_timers = 0  # that were cancelled, at most: some have run or are forgotten
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_error)
        self.slow_callback_duration = 1e9

    def next_number(self) -> int:
        """The number of a new task or future."""
        self._numbers += 1
        return self._numbers

    get_debug = staticmethod(bool)  # always False, and asked with every future and task

    # Time.

    def time(self) -> float:
        return Time.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # a loop of one thread

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        # Timers of a real host are late, never early.
        when = Time.now + delay + self.random.random() * _LATE
        timer = _Timer(self, when, callback, args, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, timer))
        return timer

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        timer = _Timer(self, when, callback, args, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, timer))
        return timer

    # Tasks.

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(loop=self)

    def _make_task(self, loop: Any, coro: Any, *, context: Any = None, name: str | None = None) -> "asyncio.Task[Any]":
        node = context.get(NODE) if context is not None else NODE.get()
        if node is None and self.current is not None:
            # The product starts some tasks in an empty context, and they are its process's all the same.
            node = self.current
            context = contextvars.copy_context() if context is None else context
            context.run(NODE.set, node)
        task = _Task(coro, loop=self, name=name, context=context)
        if node is not None:
            node.tasks[task] = None
            if len(node.tasks) % 512 == 0:
                node.forget_done()
        return task

    def _note_error(self, _loop: Any, context: dict[str, Any]) -> None:
        self.errors.append((self.current.name if self.current else "-", context))

    # One turn.

    def _run_once(self) -> None:
        for node in self.resuming:
            # Before what has become ready since: callbacks of a process keep their order.
            node.paused = False
            self._ready.extendleft(reversed(node.held))
            node.held = []
        self.resuming.clear()
        self._advance()
        batch = [*self._ready]
        self._ready.clear()
        if len(batch) > 1:
            self._shuffle(batch)
        for handle in batch:
            if handle.is_cancelled:
                continue
            node = handle.context.get(NODE)
            if node is not None and (node.dead or node.paused):
                (self.graveyard if node.dead else node.held).append(handle)
                continue
            self.current = node
            try:
                handle.context.run(handle.callback, *handle.arguments)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"Exception in {handle.callback!r}", "exception": error})
        self.current = None

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if self._ready:
            Time.now += self._turn_seconds
        elif timers:
            Time.now = max(Time.now, timers[0][0])
        else:
            raise Deadlock
        while timers and timers[0][0] <= Time.now:
            timer = heapq.heappop(timers)[2]
            if not timer.is_cancelled:
                self._ready.append(timer)
        if self.cancelled_timers > 200 and self.cancelled_timers > len(timers) // 2:
            self.forget_cancelled()

    def forget_cancelled(self) -> None:
        """Lets go of timers that were cancelled, and of their contexts."""
        self._timers[:] = [timer for timer in self._timers if not timer[2].is_cancelled]
        heapq.heapify(self._timers)
        self.cancelled_timers = 0

    def _shuffle(self, batch: list[Any]) -> None:
        """Steps of different tasks may run in any order; every other callback keeps its place, as asyncio promises."""
        places = [index for index, handle in enumerate(batch) if _is_step(handle.callback)]
        if len(places) > 1:
            steps = [batch[index] for index in places]
            self.random.shuffle(steps)
            for index, handle in zip(places, steps, strict=True):
                batch[index] = handle

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """No other thread."""

    def close(self) -> None:
        self._closed = True

    # What would leave the world.

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Runs the function on the loop after a seeded delay: a thread that is quick or slow."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except BaseException as error:
                future.set_exception(error)

        start = Fiber(self, copy_context(), run).resume if self.runs_in_fibers else run
        self.call_later(self.random.expovariate(1 / 2e-4), start)
        return future

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        """Of sockets that listen: calls back when a connection waits."""
        fd.watch(lambda: callback(*args), contextvars.copy_context())

    def remove_reader(self, fd: Any) -> bool:
        fd.watch(None, None)
        return True

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **options: Any) -> Any:
        return sock.adopt(protocol_factory)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return await self.network.connect(protocol_factory, host, port, NODE.get())

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        return [(2, 1, 6, "", (host, port))]

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """No signals."""


def _is_step(callback: Any) -> bool:
    kind = type(callback)
    if kind is BuiltinFunctionType:
        return bool(callback.__name__ == "task_wakeup")
    return kind.__name__ == "TaskStepMethWrapper"
