"""The calls of one server: the methods that they may call, their tasks, what they share, and when each was read."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from grpc import aio

from baton_http2.clock import perf_counter
from baton_http2.server.methods import CallDetails, Refuse
from baton_http2.turns import CallTurns

Find = Callable[[CallDetails], Awaitable[Any]]
_READ_AT: ContextVar[float | None] = ContextVar("call_read_at", default=None)


class Calls:
    """The calls that run, each in a task of its own; they start with copies of `context`.

    `refuse` decides if a caller may call a method; None allows all. `inflating` is held by the call whose request is
    decompressed, until that is parsed: one at a time is in memory. `changed` is set when no call runs any more.
    """

    def __init__(self, interceptors: Sequence["aio.ServerInterceptor[Any, Any]"], refuse: Refuse | None) -> None:
        self.refuse = refuse
        self.context = contextvars.copy_context()
        self.inflating = asyncio.Lock()
        self.turns = CallTurns()
        self.tasks: set[asyncio.Task[None]] = set()
        self.changed = asyncio.Event()
        self._methods: dict[str, Any] = {}
        self._generic: list[Any] = []
        find: Find = self._look_up
        for interceptor in reversed(interceptors):
            find = partial(interceptor.intercept_service, find)
        self.find = find

    def add_generic(self, handlers: Iterable[Any]) -> None:
        """Adds handlers that are asked for each method that is not registered."""
        self._generic.extend(handlers)

    def add_methods(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        """Adds the handlers of a service, by the names of its methods."""
        self._methods.update({f"/{service_name}/{name}": handler for name, handler in handlers.items()})

    def expects_one_message(self, path: str) -> bool:
        """True if the method's request is known to be a single message."""
        handler = self._methods.get(path)
        return handler is not None and not handler.request_streaming

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs a call in a task of its own, with fresh context variables, until the call says `ended`."""
        task = self.context.copy().run(asyncio.get_running_loop().create_task, work)
        self.tasks.add(task)
        return task

    def ended(self, task: "asyncio.Task[None]") -> None:
        """Forgets the task of a call that is done."""
        self.tasks.discard(task)
        if not self.tasks:
            self.changed.set()

    async def _look_up(self, details: CallDetails) -> Any:
        handler = self._methods.get(details.method)
        if handler is not None:
            return handler
        found = (generic.service(details) for generic in self._generic)
        return next((handler for handler in found if handler is not None), None)


def note_read(at: float) -> None:
    """Records when the call that this task serves was read, in seconds of time.perf_counter."""
    _READ_AT.set(at)


def read_at() -> float:
    """The time at which the call of this task was read; now, where another server has read it."""
    at = _READ_AT.get()
    return perf_counter() if at is None else at
