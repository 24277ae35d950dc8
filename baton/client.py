"""The synchronous client: for scripts, notebooks and threads."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import grpc

from baton import cluster_requests, drawing_requests, requests
from baton.connection.credentials import Tls
from baton.connection.routers import Routers
from baton.connection.settings import CHANNEL_OPTIONS, Settings
from baton.drawing_requests import DrawCall
from baton.error_details import from_rpc_error
from baton.generation import requests as answers
from baton.generation.sync import Generation, Inquirer, Stops, error_of
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
) -> Callable[Concatenate["Client", Arguments], Value]:
    """The method for calls with one response."""

    def method(self: "Client", call: UnaryCall[Value]) -> Value:
        return self._call(call)

    method.__name__, method.__qualname__ = definition.__name__, f"Client.{definition.__name__}"
    method.__annotations__["return"] = requests.response_of(definition)
    return requests.takes(definition)(method)


class Client:
    """A connection to a Baton router.

        from baton import Client

        with Client("127.0.0.1:7070") as client:
            for event in client.generate("Sort: pear apple mango"):
                print(event.token.text, end="")

    The connection is made by the first call. A client may be shared by threads. Every method raises a subclass of
    `baton.BatonError` whose `reason` is a section of docs/errors.md.
    """

    @requests.takes(Settings)
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._routers = Routers([_open(address, settings.tls) for address in settings.addresses])
        self._stopping = Stops(self._routers, settings)
        self._inquirer = Inquirer(self._routers, settings)

    def __repr__(self) -> str:
        return self._settings.describe("Client")

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The router's `host:port`."""
        return self._settings.address

    def close(self) -> None:
        """Closes the connection and cancels running calls. The client cannot be used afterwards."""
        self._stopping.wait()
        self._routers.is_closed = True
        for channel in self._routers.channels:
            channel.close()

    @requests.takes(answers.generate)
    def generate(self, call: answers.GenerateCall) -> "Generation":
        return Generation(self._routers, self._settings, call, self._stopping.stop, self._inquirer)

    @requests.takes(answers.resume)
    def resume(self, call: answers.GenerateCall) -> "Generation":
        return Generation(self._routers, self._settings, call, self._stopping.stop, self._inquirer)

    @requests.takes(answers.generate)
    def generate_unary(self, call: answers.GenerateCall) -> generate_pb2.GenerateUnaryResponse:
        """Returns a whole answer at once; `.token.text` is its text. The arguments are those of `generate`."""
        return self._call(answers.generate_unary(call))

    @requests.takes(drawing_requests.draw)
    def draw(
        self, call: DrawCall[image_pb2.ImageServiceGenerateRequest]
    ) -> Iterator[image_pb2.ImageServiceGenerateResponse]:
        return self._drawing("ImageService/Generate", call)

    @requests.takes(drawing_requests.draw_video)
    def draw_video(
        self, call: DrawCall[video_pb2.VideoServiceGenerateRequest]
    ) -> Iterator[video_pb2.VideoServiceGenerateResponse]:
        return self._drawing("VideoService/Generate", call)

    def _drawing(self, method: str, call: DrawCall[Any]) -> Iterator[Any]:
        with self._settings.begin(method) as trace:
            metadata = self._settings.metadata(trace, call.priority)
            seconds = self._settings.attempts(call.timeout_seconds).seconds_left
            events = self._routers.call(method, call.request, seconds, metadata)
            try:
                yield from events
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            finally:
                events.cancel()

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

    def _call(self, call: UnaryCall[Value]) -> Value:
        attempts = self._settings.attempts(call.timeout_seconds)
        with self._settings.begin(call.method) as trace:
            metadata = self._settings.metadata(trace, call.priority, is_recorded=call.is_recorded)
            while True:
                present = self._routers.present
                try:
                    return call.read(self._routers.call(call.method, call.message, attempts.seconds_left, metadata))
                except grpc.RpcError as error:
                    failure = error_of(error)
                    pause = attempts.pause_after(failure)
                    if pause is None:
                        raise failure from error
                self._routers.leave(present)
                trace.retry(failure, pause)
                time.sleep(pause)


def _open(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *tls.channel_options())
    return grpc.secure_channel(address, tls.channel_credentials(), options=options)
