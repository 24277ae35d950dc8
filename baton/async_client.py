"""The asynchronous client: for programs that run an event loop."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from grpc import aio

from baton import cluster_requests, requests
from baton.calls import stream, unary
from baton.connection.channels import CHANNEL_OPTIONS
from baton.connection.credentials import Tls
from baton.connection.routers import Routers
from baton.connection.settings import STOP_SECONDS, Settings
from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.inference.v1 import (
    generate_pb2,
    image_pb2,
    server_info_pb2,
)
from baton.requests import UnaryCall
from baton.resuming import Received

if TYPE_CHECKING:
    from typing_extensions import Self

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def _unary(
    definition: Callable[Arguments, UnaryCall[Value]],
) -> Callable[Concatenate["AsyncClient", Arguments], Awaitable[Value]]:
    """The method for calls with one response."""

    async def method(self: "AsyncClient", call: UnaryCall[Value]) -> Value:
        return await self._call(call)

    method.__name__, method.__qualname__ = definition.__name__, f"AsyncClient.{definition.__name__}"
    method.__annotations__["return"] = requests.response_of(definition)
    return requests.takes(definition)(method)


class AsyncClient:
    """A connection to a Baton router, for asyncio.

        from baton import AsyncClient

        async with AsyncClient("127.0.0.1:7070") as client:
            async with client.generate("Sort: pear apple mango") as events:
                async for event in events:
                    print(event.token.text, end="")

    The connection is made by the first call. A client serves any number of calls at once, of one event loop. Every
    method raises a subclass of `baton.BatonError` whose `reason` is a section of docs/errors.md.
    """

    @requests.takes(Settings)
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._routers = Routers([_open(address, settings.tls) for address in settings.addresses])
        self._questions = _Questions(self._routers, settings)
        self._stopping: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return self._settings.describe("AsyncClient")

    async def __aenter__(self) -> "Self":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """The router's `host:port`."""
        return self._settings.address

    async def close(self) -> None:
        """Closes the connection and cancels running calls. The client cannot be used afterwards."""
        if self._stopping:
            await asyncio.wait(self._stopping, timeout=STOP_SECONDS)
        for channel in self._routers.channels:
            await channel.close(None)

    @requests.takes(requests.generate)
    def generate(self, call: requests.GenerateCall) -> "AsyncGeneration":
        return AsyncGeneration(self._routers, self._settings, call, self._stop, self._questions)

    @requests.takes(requests.resume)
    def resume(self, call: requests.GenerateCall) -> "AsyncGeneration":
        return AsyncGeneration(self._routers, self._settings, call, self._stop, self._questions)

    @requests.takes(requests.generate)
    async def generate_unary(self, call: requests.GenerateCall) -> generate_pb2.GenerateUnaryResponse:
        """Returns a whole answer at once; `.token.text` is its text. The arguments are those of `generate`."""
        return await self._call(requests.generate_unary(call))

    @requests.takes(requests.draw)
    async def draw(self, call: requests.DrawCall) -> AsyncGenerator[image_pb2.ImageServiceGenerateResponse, None]:
        with self._settings.begin("ImageService/Generate") as trace:
            metadata = self._settings.metadata(trace, call.priority)
            seconds = self._settings.attempts(call.timeout_seconds).seconds_left
            method = self._routers.method("ImageService/Generate")
            async with aclosing(stream(method(call.request, timeout=seconds, metadata=metadata))) as events:
                async for event in events:
                    yield event

    cancel = _unary(requests.cancel)
    embed = _unary(requests.embed)
    tokenize = _unary(requests.tokenize)
    detokenize = _unary(requests.detokenize)
    models = _unary(requests.models)
    model = _unary(requests.model)
    server_info = _unary(requests.server_info)
    workers = _unary(cluster_requests.workers)
    tenants = _unary(cluster_requests.tenants)
    move_streams = _unary(cluster_requests.move_streams)
    drain_worker = _unary(cluster_requests.drain_worker)
    change_role = _unary(cluster_requests.change_role)
    loras = _unary(cluster_requests.loras)
    load_lora = _unary(cluster_requests.load_lora)
    unload_lora = _unary(cluster_requests.unload_lora)
    explain_route = _unary(cluster_requests.explain_route)
    records = _unary(requests.records)

    async def _call(self, call: UnaryCall[Value]) -> Value:
        attempts = self._settings.attempts(call.timeout_seconds)
        with self._settings.begin(call.method) as trace:
            metadata = self._settings.metadata(trace, call.priority, is_recorded=call.is_recorded)
            while True:
                present = self._routers.present
                try:
                    method = self._routers.method(call.method)
                    return call.read(
                        await unary(method(call.message, timeout=attempts.seconds_left, metadata=metadata))
                    )
                except BatonError as error:
                    pause = attempts.pause_after(error)
                    if pause is None:
                        raise
                    trace.retry(error, pause)
                self._routers.leave(present)
                await asyncio.sleep(pause)

    def _stop(self, handle: str) -> None:
        """Ends an answer that goes on without its reader, without waiting."""
        stopping = asyncio.ensure_future(self._end(handle))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    async def _end(self, handle: str) -> None:
        message = generate_pb2.CancelGenerationRequest(handle=handle)
        method = self._routers.method("InferenceService/CancelGeneration")
        with suppress(BatonError):  # it ends by itself, a little later
            await unary(method(message, timeout=STOP_SECONDS, metadata=self._settings.bare_metadata))


class AsyncGeneration:
    """An answer as it arrives: an asynchronous iterator of GenerateResponse: `started`, `token`s, then `finished`.

    `request_id` and `trace_id` are known after the first event. Closing it, or cancelling the task that reads it, stops
    the request. `resumptions` counts how often it went on after a loss, and `handle` resumes it elsewhere.
    """

    def __init__(
        self,
        routers: Routers,
        settings: Settings,
        made: requests.GenerateCall,
        stop: Callable[[str], None],
        questions: "_Questions",
    ) -> None:
        self._questions = questions
        self.request_id = made.request.request_id
        self.trace_id = ""
        self._routers = routers
        self._received = Received(made.request, settings.resume, made.handle)
        self._stop = stop
        self._is_lost = False
        self._settings = settings
        self._events = self._read(made)

    def __repr__(self) -> str:
        return f"<baton.AsyncGeneration request_id={self.request_id!r} trace_id={self.trace_id!r}>"

    def __aiter__(self) -> "Self":
        return self

    async def __anext__(self) -> generate_pb2.GenerateResponse:
        return await anext(self._events)

    async def __aenter__(self) -> "Self":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def resumptions(self) -> int:
        """The number of times that a router took the answer over."""
        return self._received.resumptions

    @property
    def recomputations(self) -> int:
        """The number of these at which the prompt was computed again, since no worker had the answer any more."""
        return self._received.recomputations

    @property
    def handle(self) -> str:
        """A secret by which any router goes on with the answer; empty if it cannot be resumed."""
        return self._received.handle

    async def text(self) -> str:
        """Reads what is left of the answer, and returns its text; of several answers, that of the first."""
        return "".join([event.token.text async for event in self if event.token.index == 0])

    async def aclose(self) -> None:
        """Stops the request if it still runs."""
        await self._events.aclose()

    async def _read(self, made: requests.GenerateCall) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        attempts, received = self._settings.attempts(made.timeout_seconds), self._received
        with self._settings.begin("InferenceService/Generate") as trace:
            self.trace_id = trace.trace_id
            metadata = self._settings.metadata(trace, made.priority, is_recorded=made.is_recorded)
            has_started = False
            try:
                while True:
                    present = self._routers.present
                    name, message = received.next_call()
                    call = self._routers.method(name)(message, timeout=attempts.seconds_left, metadata=metadata)
                    try:
                        async with self._watching(call, present), aclosing(stream(call)) as events:
                            async for event in events:
                                is_shown = received.add(event)
                                if not has_started:
                                    has_started, self.request_id = True, event.request_id
                                    trace.identify(event.request_id)
                                if is_shown:
                                    yield event
                        return
                    except BatonError as error:
                        failure = self._failure(error)
                        pause = received.pause_after(failure, attempts.seconds_left)
                        if pause is None and not has_started:
                            pause = attempts.pause_after(failure)
                        if pause is None:
                            raise
                        trace.retry(failure, pause)
                    self._routers.leave(present)
                    await asyncio.sleep(pause)
            finally:
                if received.handle and not received.is_complete:
                    self._stop(received.handle)

    def _failure(self, error: BatonError) -> BatonError:
        if not self._is_lost:
            return error
        self._is_lost = False
        return Unavailable("the router says nothing, and does not answer")

    @asynccontextmanager
    async def _watching(self, call: Any, router: int) -> AsyncGenerator[None, None]:
        """Watches for a router that hangs while the context is open, if answers can be resumed."""
        resume = self._settings.resume
        if resume is None:
            yield
            return
        watching = asyncio.ensure_future(self._watch(call, router, resume.look_seconds))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, call: Any, router: int, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            # Silent still, once the router has not answered: it may have sent something meanwhile.
            if self._received.is_silent() and not await self._questions.answers(router) and self._received.is_silent():
                self._is_lost = True
                call.cancel()
                return


class _Questions:
    """Asks routers whether they still answer. Streams of one router that ask at the same time ask once."""

    def __init__(self, routers: Routers, settings: Settings) -> None:
        self._routers = routers
        self._settings = settings
        self._asked: dict[int, asyncio.Future[bool]] = {}

    async def answers(self, router: int) -> bool:
        """True if this router answers."""
        if router not in self._asked:
            self._asked[router] = asyncio.ensure_future(self._ask(router))
            self._asked[router].add_done_callback(lambda _asked: self._asked.pop(router, None))
        return await asyncio.shield(self._asked[router])

    async def _ask(self, router: int) -> bool:
        method = self._routers.method("InferenceService/GetServerInfo", router)
        seconds = self._settings.question_seconds
        try:
            metadata = self._settings.bare_metadata
            await unary(method(server_info_pb2.GetServerInfoRequest(), timeout=seconds, metadata=metadata))
        except (Unavailable, DeadlineExceeded):
            return False
        except BatonError:
            return True
        return True


def _open(address: str, tls: Tls | None) -> aio.Channel:
    if tls is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *tls.channel_options())
    return aio.secure_channel(address, tls.channel_credentials(), options=options)
