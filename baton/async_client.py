"""The asynchronous client: for programs that run an event loop."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from grpc import aio

from baton import cluster_requests, drawing_requests, requests
from baton.calls import stream, unary
from baton.connection.credentials import Tls
from baton.connection.routers import Routers
from baton.connection.settings import CHANNEL_OPTIONS, STOP_SECONDS, Settings
from baton.drawing_requests import DrawCall
from baton.errors import BatonError
from baton.generation import requests as answers
from baton.generation.asynchronous import AsyncGeneration, AsyncInquirer
from baton.inference.v1 import (
    generate_pb2,
    image_pb2,
    video_pb2,
)
from baton.requests import UnaryCall

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
        self._inquirer = AsyncInquirer(self._routers, settings)
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

    @requests.takes(answers.generate)
    def generate(self, call: answers.GenerateCall) -> "AsyncGeneration":
        return self._begun(AsyncGeneration(self._routers, self._settings, call, self._stop, self._inquirer))

    @requests.takes(answers.resume)
    def resume(self, call: answers.GenerateCall) -> "AsyncGeneration":
        return self._begun(AsyncGeneration(self._routers, self._settings, call, self._stop, self._inquirer))

    @requests.takes(answers.generate)
    async def generate_unary(self, call: answers.GenerateCall) -> generate_pb2.GenerateUnaryResponse:
        """Returns a whole answer at once; `.token.text` is its text. The arguments are those of `generate`."""
        return await self._call(answers.generate_unary(call))

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
    upgrade_worker = _unary(cluster_requests.upgrade_worker)
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


def _open(address: str, tls: Tls | None) -> aio.Channel:
    if tls is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *tls.channel_options())
    return aio.secure_channel(address, tls.channel_credentials(), options=options)
