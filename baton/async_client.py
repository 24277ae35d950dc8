"""The asynchronous client: for programs that run an event loop."""

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from grpc import aio

from baton import cluster_requests, drawing_requests, requests
from baton.calls import stream, unary
from baton.connection.credentials import Tls
from baton.connection.retry import Resume
from baton.connection.routers import Routers
from baton.connection.settings import CHANNEL_OPTIONS, STOP_SECONDS, Settings
from baton.drawing_requests import DrawCall
from baton.errors import BatonError, Unavailable
from baton.inference.v1 import (
    generate_pb2,
    image_pb2,
    video_pb2,
)
from baton.inquiries import Finding, Inquiries, Question, Reply
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
        self._inquirer = _Inquirer(self._routers, settings)
        self._stopping: set[asyncio.Task[Any]] = set()
        self._generations: weakref.WeakSet[AsyncGeneration] = weakref.WeakSet()

    def __repr__(self) -> str:
        return self._settings.describe("AsyncClient")

    async def __aenter__(self) -> "Self":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """The router's `host:port`."""
        return self._settings.address

    async def close(self) -> None:
        """Closes the connection and cancels running calls. The client cannot be used afterwards."""
        if self._stopping:
            await asyncio.wait(self._stopping, timeout=STOP_SECONDS)
        self._routers.is_closed = True
        for generation in tuple(self._generations):
            generation.cancel()  # gRPC does not find a call that another coroutine reads for its task
        for channel in self._routers.channels:
            await channel.close(None)

    @requests.takes(requests.generate)
    def generate(self, call: requests.GenerateCall) -> "AsyncGeneration":
        return self._begun(AsyncGeneration(self._routers, self._settings, call, self._stop, self._inquirer))

    @requests.takes(requests.resume)
    def resume(self, call: requests.GenerateCall) -> "AsyncGeneration":
        return self._begun(AsyncGeneration(self._routers, self._settings, call, self._stop, self._inquirer))

    @requests.takes(requests.generate)
    async def generate_unary(self, call: requests.GenerateCall) -> generate_pb2.GenerateUnaryResponse:
        """Returns a whole answer at once; `.token.text` is its text. The arguments are those of `generate`."""
        return await self._call(requests.generate_unary(call))

    @requests.takes(drawing_requests.draw)
    def draw(
        self, call: DrawCall[image_pb2.ImageServiceGenerateRequest]
    ) -> AsyncGenerator[image_pb2.ImageServiceGenerateResponse, None]:
        return self._drawing("ImageService/Generate", call)

    @requests.takes(drawing_requests.draw_video)
    def draw_video(
        self, call: DrawCall[video_pb2.VideoServiceGenerateRequest]
    ) -> AsyncGenerator[video_pb2.VideoServiceGenerateResponse, None]:
        return self._drawing("VideoService/Generate", call)

    async def _drawing(self, method: str, call: DrawCall[Any]) -> AsyncGenerator[Any, None]:
        with self._settings.begin(method) as trace:
            metadata = self._settings.metadata(trace, call.priority)
            seconds = self._settings.attempts(call.timeout_seconds).seconds_left
            events = stream(self._routers.call(method, call.request, seconds, metadata))
            async with aclosing(events):
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
                    seconds = attempts.seconds_left
                    return call.read(await unary(self._routers.call(call.method, call.message, seconds, metadata)))
                except BatonError as error:
                    pause = attempts.pause_after(error)
                    if pause is None:
                        raise
                    trace.retry(error, pause)
                self._routers.leave(present)
                await asyncio.sleep(pause)

    def _begun(self, generation: "AsyncGeneration") -> "AsyncGeneration":
        self._generations.add(generation)
        return generation

    def _stop(self, handle: str) -> None:
        """Ends an answer that goes on without its reader, without waiting."""
        stopping = asyncio.ensure_future(self._end(handle))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    async def _end(self, handle: str) -> None:
        method, message = "InferenceService/CancelGeneration", generate_pb2.CancelGenerationRequest(handle=handle)
        with suppress(BatonError):  # it ends by itself, a little later
            await unary(self._routers.call(method, message, STOP_SECONDS, self._settings.bare_metadata))


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
        inquirer: "_Inquirer",
    ) -> None:
        self._inquirer = inquirer
        self.request_id = made.request.request_id
        self.trace_id = ""
        self._routers = routers
        self._received = Received(made.request, settings.resume, made.handle)
        self._stop = stop
        self._is_lost = False
        self._running: Any = None  # the present call
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

    async def __aexit__(self, *exception: object) -> None:
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

    def cancel(self) -> None:
        """Ends the running call: its reader gets Cancelled."""
        if self._running is not None:
            self._running.cancel()

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
                    self._running = call = self._routers.call(name, message, attempts.seconds_left, metadata)
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
                        if received.is_complete:
                            return  # only its status is missing
                        failure = self._failure(error)
                        pause = received.pause_after(failure, attempts.seconds_left)
                        if pause is None and not has_started:
                            pause = attempts.pause_after(failure)
                        if pause is None:
                            raise failure from error.__cause__
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
        if self._settings.resume is None:
            yield
            return
        watching = asyncio.ensure_future(self._watch(call, router))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, call: Any, router: int) -> None:
        received, silence = self._received, self._received.silence
        self._inquirer.meet(router)
        while True:
            pause, began = silence.look_seconds, time.monotonic()
            await asyncio.sleep(pause)
            if silence.seconds_until_due > 0 or silence.was_held_up(time.monotonic() - began - pause):
                continue
            heard_at = silence.heard_at
            is_lost = received.is_resumable and await self._inquirer.is_lost(router, received)
            if is_lost and silence.heard_at == heard_at and received.is_resumable:
                self._is_lost = True
                silence.leave()
                call.cancel()
                return
            silence.postpone()


class _Inquirer:
    """Asks routers whether they are lost. Streams of one router that ask at the same time ask once."""

    def __init__(self, routers: Routers, settings: Settings) -> None:
        self._routers = routers
        self._settings = settings
        self._rule = Inquiries(settings.resume or Resume(), len(routers.channels))
        self._meeting: set[asyncio.Future[bool]] = set()
        self._asking: dict[int, asyncio.Future[Finding]] = {}

    def meet(self, router: int) -> None:
        """Learns how long the routers take to answer, if it is not known of this one; does not wait for it."""
        if self._rule.knows(router) or self._meeting:
            return
        for each in range(len(self._routers.channels)):
            meeting = asyncio.ensure_future(self._run(self._rule.meet(each)))
            self._meeting.add(meeting)
            meeting.add_done_callback(self._meeting.discard)

    async def is_lost(self, router: int, received: Received) -> bool:
        """True if this router has to be left, by one of its streams."""
        while not self._rule.is_known_lost(router, received):
            asking, is_own = self._asking.get(router), False
            if asking is None:
                asking, is_own = asyncio.ensure_future(self._run(self._rule.ask(router, received))), True
                self._asking[router] = asking
                asking.add_done_callback(lambda _done: self._asking.pop(router, None))
            finding = await asyncio.shield(asking)
            if is_own or finding is not Finding.SILENT:
                return finding is Finding.LOST
        return True

    async def _run(self, inquiry: Generator[Question, Reply, Value]) -> Value:
        question = next(inquiry)
        while True:
            try:
                question = inquiry.send(await self._ask(question))
            except StopIteration as found:
                value: Value = found.value
                return value

    async def _ask(self, question: Question) -> Reply:
        metadata = self._settings.bare_metadata
        try:
            return await unary(
                self._routers.call(question.method, question.message, question.seconds, metadata, question.router)
            )
        except BatonError as error:
            return error


def _open(address: str, tls: Tls | None) -> aio.Channel:
    if tls is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *tls.channel_options())
    return aio.secure_channel(address, tls.channel_credentials(), options=options)
