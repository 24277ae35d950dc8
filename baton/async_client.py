"""The asynchronous client: for programs that run an event loop."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from grpc import aio

from baton import requests
from baton.calls import stream, unary
from baton.connection.channels import CHANNEL_OPTIONS
from baton.connection.credentials import Tls
from baton.connection.settings import Settings
from baton.errors import BatonError
from baton.inference.v1 import (
    cluster_service_pb2_grpc,
    generate_pb2,
    inference_service_pb2_grpc,
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
        self._channel = _open(settings.address, settings.tls)
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._cluster = cluster_service_pb2_grpc.ClusterServiceStub(self._channel)

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
        await self._channel.close(None)

    @requests.takes(requests.generate)
    def generate(self, call: requests.GenerateCall) -> "AsyncGeneration":
        return AsyncGeneration(self._inference.Generate, self._settings, call)

    @requests.takes(requests.generate)
    async def generate_unary(self, call: requests.GenerateCall) -> generate_pb2.GenerateUnaryResponse:
        """Returns a whole answer at once; `.token.text` is its text. The arguments are those of `generate`."""
        return await self._call(requests.generate_unary(call))

    cancel = _unary(requests.cancel)
    embed = _unary(requests.embed)
    tokenize = _unary(requests.tokenize)
    detokenize = _unary(requests.detokenize)
    models = _unary(requests.models)
    model = _unary(requests.model)
    server_info = _unary(requests.server_info)
    workers = _unary(requests.workers)
    tenants = _unary(requests.tenants)
    loras = _unary(requests.loras)
    load_lora = _unary(requests.load_lora)
    unload_lora = _unary(requests.unload_lora)
    explain_route = _unary(requests.explain_route)

    async def _call(self, call: UnaryCall[Value]) -> Value:
        method = self._method(call.method)
        attempts = self._settings.attempts(call.timeout_seconds)
        with self._settings.begin(call.method) as trace:
            metadata = self._settings.metadata(trace, call.priority)
            while True:
                try:
                    return call.read(
                        await unary(method(call.message, timeout=attempts.seconds_left, metadata=metadata))
                    )
                except BatonError as error:
                    pause = attempts.pause_after(error)
                    if pause is None:
                        raise
                    trace.retry(error, pause)
                await asyncio.sleep(pause)

    def _method(self, name: str) -> Any:
        """The stub of `Service/Method`."""
        service, _, method = name.partition("/")
        return getattr({"InferenceService": self._inference, "ClusterService": self._cluster}[service], method)


class AsyncGeneration:
    """An answer as it arrives: an asynchronous iterator of GenerateResponse: `started`, `token`s, then `finished`.

    `request_id` and `trace_id` are known after the first event. Closing it, or cancelling the task that reads it, stops
    the request.
    """

    def __init__(
        self,
        call: "Callable[..., aio.UnaryStreamCall[Any, generate_pb2.GenerateResponse]]",
        settings: Settings,
        made: requests.GenerateCall,
    ) -> None:
        self.request_id = made.request.request_id
        self.trace_id = ""
        self._call = call
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

    async def text(self) -> str:
        """Reads what is left of the answer, and returns its text; of several answers, that of the first."""
        return "".join([event.token.text async for event in self if event.token.index == 0])

    async def aclose(self) -> None:
        """Stops the request if it still runs."""
        await self._events.aclose()

    async def _read(self, made: requests.GenerateCall) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        attempts = self._settings.attempts(made.timeout_seconds)
        with self._settings.begin("InferenceService/Generate") as trace:
            self.trace_id = trace.trace_id
            metadata = self._settings.metadata(trace, made.priority)
            while True:
                has_started = False
                call = self._call(made.request, timeout=attempts.seconds_left, metadata=metadata)
                try:
                    async with aclosing(stream(call)) as events:
                        async for event in events:
                            if not has_started:
                                has_started, self.request_id = True, event.request_id
                                trace.identify(event.request_id)
                            yield event
                    return
                except BatonError as error:
                    pause = None if has_started else attempts.pause_after(error)
                    if pause is None:
                        raise
                    trace.retry(error, pause)
                await asyncio.sleep(pause)


def _open(address: str, tls: Tls | None) -> aio.Channel:
    if tls is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *tls.channel_options())
    return aio.secure_channel(address, tls.channel_credentials(), options=options)
