"""MultiplexService: starts the calls of a stream, stops them, and writes what they have to say."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

import structlog
from grpc import StatusCode

from baton.engine.v1 import multiplex_pb2 as pb
from baton.engine.v1 import multiplex_pb2_grpc
from baton.errors import InvalidRequest
from baton_http2.server.methods import Method, method_of
from baton_http2.turns import CallTurns
from engine_protocol.multiplex.call import ServedCall
from engine_protocol.multiplex.response_queue import ResponseQueue
from rpc.interceptors.wrap import WrapMethods
from rpc.server import ConnectionLimits, Service, ServiceAround
from runtime.aio import ended_with, wait_until_done

log = structlog.get_logger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["MultiplexService"].full_name


class MultiplexServicer(multiplex_pb2_grpc.MultiplexServiceServicer):
    """Offers `methods`, by their paths, on streams that run up to `max_calls` at once.

    Calls start with the context variables of the code that makes this object.
    """

    def __init__(self, methods: Mapping[str, Method], max_calls: int) -> None:
        self._methods = methods
        self._max_calls = max_calls
        self._variables = copy_context()
        self._turns = CallTurns()

    # Writes instead of yielding: the calls write while requests are read.
    async def Multiplex(self, requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> None:  # type: ignore[override]
        await _Stream(self._methods, self._max_calls, self._variables, self._turns, context).run(requests)


def multiplex(services: Sequence[Service]) -> ServiceAround:
    """The service that offers the methods of `services`, wrapped as they are, over shared streams."""

    def make(interceptor: WrapMethods, limits: ConnectionLimits) -> Service:
        found = _Methods()
        for service in services:
            service.add(service.servicer, found)
        methods = {path: method_of(interceptor.wrap(path, handler)) for path, handler in found.handlers.items()}
        add = multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server
        return Service(SERVICE_NAME, add, MultiplexServicer(methods, limits.max_streams))

    return make


class _Methods:
    """The handlers that generated code adds to a server, by the paths of their methods."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """The same handlers come by `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """The handlers of a service, by the names of its methods."""
        self.handlers.update({f"/{service_name}/{name}": handler for name, handler in method_handlers.items()})


class _Stream:
    """The calls of one stream."""

    def __init__(
        self, methods: Mapping[str, Method], max_calls: int, variables: Context, turns: CallTurns, stream: Any
    ) -> None:
        self.queue = ResponseQueue()
        self.stream = stream
        self._methods = methods
        self._max_calls = max_calls
        self._variables = variables
        self._turns = turns
        self._calls: dict[int, ServedCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, requests: AsyncIterator[pb.MultiplexRequest]) -> None:
        """Runs until the caller ends the stream, or leaves; then no call runs any more."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read(requests))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, writing):
                if task.done():
                    task.result()
        finally:
            reading.cancel()
            writing.cancel()
            for call in tuple(self._calls.values()):
                self._leave(call)
            await wait_until_done(reading, writing, *self._tasks)
            self.queue.close()

    def forget(self, call: int) -> None:
        """The call has ended."""
        self._calls.pop(call, None)

    async def _read(self, requests: AsyncIterator[pb.MultiplexRequest]) -> None:
        async for request in requests:
            for start in request.starts:
                self._start(start)
            for number in request.cancelled:
                if (call := self._calls.get(number)) is not None:
                    self._leave(call)
            for number in request.paused:
                if (call := self._calls.get(number)) is not None:
                    call.pause(is_paused=True)
            for number in request.resumed:
                if (call := self._calls.get(number)) is not None:
                    call.pause(is_paused=False)

    def _start(self, start: pb.CallStart) -> None:
        if start.call in self._calls:
            raise InvalidRequest.of("starts", f"call {start.call} is running")
        # In fresh variables: the stream's are not the call's.
        variables = self._variables.copy()
        call = variables.run(ServedCall, self, start)
        self._calls[start.call] = call
        if len(self._calls) > self._max_calls:
            call.refuse(StatusCode.RESOURCE_EXHAUSTED, f"more than {self._max_calls} calls on one stream")
            return
        self._turns.run(partial(self._begin, call, self._methods.get(start.method), variables))

    def _begin(self, call: ServedCall, method: Method | None, variables: Context) -> None:
        if call.is_over:
            return
        task = variables.run(call.start, method)
        self._tasks.add(task)
        task.add_done_callback(self._record_end)

    def _leave(self, call: ServedCall) -> None:
        """Ends a call for its caller, who has gone: now, or in a later turn of the loop if it runs."""
        if call.is_running:
            self.forget(call.number)  # Others may have its place.
            self._turns.run(call.leave)
        else:
            call.leave()

    def _record_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("call failed", exc_info=error)
        ended_with(task)

    async def _write(self) -> None:
        while True:
            batch = await self.queue.pull()
            is_sent = False
            try:
                await self.stream.write(batch.message)
                is_sent = True
            finally:
                for ended in batch.ended:
                    (ended.record_sent if is_sent else ended.record_lost)()
