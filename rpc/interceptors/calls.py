"""The calls of a server: when each arrived and the size of its message, the role of its caller, and how many run.

A server waits at its end until the code of each call has ended.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

import grpc
from grpc import aio

from baton.errors import Unsupported
from baton_http2.server import methods
from baton_http2.server.calls import note_read, read_at
from baton_http2.server.methods import Behaviour, Context
from rpc.auth.access import Access, require
from rpc.auth.caller import set_caller
from runtime.aio import timeout
from runtime.clock import perf_counter
from runtime.telemetry.logs import add_log_fields

# Wraps the behaviour of the method `/package.Service/Method`.
Wrapper = Callable[[str, Behaviour], Behaviour]

_SIZE: ContextVar[int] = ContextVar("message_bytes", default=0)


def record_arrival() -> None:
    """Records now as the arrival of the call that this task serves."""
    note_read(perf_counter())


arrived_at: Final = read_at
"""When the call arrived, in seconds of time.perf_counter; now, outside of a call."""


class RecordArrivals(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """For servers of grpc.aio, which do not tell when they have read a call."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """The method's handler. Asked for in the call's own task, and before its message is read."""
        record_arrival()
        return await continuation(handler_call_details)


def record_size(message_bytes: int) -> None:
    """Records the size of the message of the call that this task serves."""
    _SIZE.set(message_bytes)


message_bytes: Final = _SIZE.get
"""The size of the call's message on the wire; 0 outside of a call."""


def authorize(access: Access) -> Wrapper:
    """Raises Unauthenticated or PermissionDenied. Inside it `current_caller` is set, and named on each log line."""

    def wrap(method: str, behaviour: Behaviour) -> Behaviour:
        if access.is_open(method):
            return behaviour
        roles = access.roles(method)

        async def authorized(request: Any, context: Context) -> Any:
            caller = access.identify(context)
            add_log_fields(caller=caller.name)
            require(caller, method, roles)
            set_caller(caller)
            return await behaviour(request, context)

        return authorized

    return wrap


class RunningCalls:
    """The calls whose code is running: after gRPC has sent a call's status, its `finally` may still run."""

    def __init__(self) -> None:
        self._count = 0
        self._idle: asyncio.Event | None = None  # for who waits

    @property
    def count(self) -> int:
        """The number of running calls."""
        return self._count

    def counted(self, _method: str, behaviour: Behaviour) -> Behaviour:
        """Counts the calls of a method."""

        async def counting(request: Any, context: Context) -> Any:
            self._count += 1
            try:
                return await behaviour(request, context)
            finally:
                self._leave()

        return counting

    async def ended(self, timeout_seconds: float) -> None:
        """Waits until no call is running. Raises TimeoutError."""
        async with timeout(timeout_seconds):
            self._idle = self._idle or asyncio.Event()
            while self._count:
                self._idle.clear()
                await self._idle.wait()

    def _leave(self) -> None:
        self._count -= 1
        if self._count == 0 and self._idle is not None:
            self._idle.set()


def as_coroutine(method: Callable[..., Any]) -> Behaviour:
    """A servicer's method as a Behaviour. A synchronous method is generated: it raises Unsupported."""
    return methods.as_coroutine(method, _unimplemented)


async def _unimplemented(_request: Any, _context: Context) -> None:
    raise Unsupported("this method is not implemented here")
