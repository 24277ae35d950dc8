"""The synchronous client: for scripts, notebooks and threads."""

import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import grpc

from baton import requests
from baton.connection.channels import CHANNEL_OPTIONS
from baton.connection.credentials import Tls
from baton.connection.settings import Settings
from baton.error_details import from_rpc_error
from baton.errors import BatonError, Cancelled
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
        self._channel = _open(settings.address, settings.tls)
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._cluster = cluster_service_pb2_grpc.ClusterServiceStub(self._channel)

    def __repr__(self) -> str:
        return self._settings.describe("Client")

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The router's `host:port`."""
        return self._settings.address

    def close(self) -> None:
        """Closes the connection and cancels running calls. The client cannot be used afterwards."""
        self._channel.close()

    @requests.takes(requests.generate)
    def generate(self, call: requests.GenerateCall) -> "Generation":
        return Generation(self._inference.Generate, self._settings, call)

    @requests.takes(requests.generate)
    def generate_unary(self, call: requests.GenerateCall) -> generate_pb2.GenerateUnaryResponse:
        """Returns a whole answer at once; `.token.text` is its text. The arguments are those of `generate`."""
        return self._call(requests.generate_unary(call))

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

    def _call(self, call: UnaryCall[Value]) -> Value:
        method = self._method(call.method)
        attempts = self._settings.attempts(call.timeout_seconds)
        with self._settings.begin(call.method) as trace:
            metadata = self._settings.metadata(trace, call.priority)
            while True:
                try:
                    return call.read(method(call.message, timeout=attempts.seconds_left, metadata=metadata))
                except grpc.RpcError as error:
                    failure = _error_of(error)
                    pause = attempts.pause_after(failure)
                    if pause is None:
                        raise failure from error
                trace.retry(failure, pause)
                time.sleep(pause)

    def _method(self, name: str) -> Any:
        """The stub of `Service/Method`."""
        service, _, method = name.partition("/")
        return getattr({"InferenceService": self._inference, "ClusterService": self._cluster}[service], method)


class Generation:
    """An answer as it arrives: an iterator of GenerateResponse, one `started`, then `token`s, then one `finished`.

    `request_id` and `trace_id` are known after the first event. Closing it, or dropping it, stops the request.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        settings: Settings,
        made: requests.GenerateCall,
    ) -> None:
        self.request_id = made.request.request_id
        self.trace_id = ""
        self._call = call
        self._running: Any = None
        self._settings = settings
        self._events = self._read(made)

    def __repr__(self) -> str:
        return f"<baton.Generation request_id={self.request_id!r} trace_id={self.trace_id!r}>"

    def __iter__(self) -> "Self":
        return self

    def __next__(self) -> generate_pb2.GenerateResponse:
        return next(self._events)

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def text(self) -> str:
        """Reads what is left of the answer, and returns its text; of several answers, that of the first."""
        return "".join(event.token.text for event in self if event.token.index == 0)

    def close(self) -> None:
        """Stops the request if it still runs. Only for the thread that reads the answer; others call `cancel`."""
        self._events.close()

    def cancel(self) -> None:
        """Stops the request, from any thread; the thread that reads the answer gets the error Cancelled."""
        if self._running is not None:
            self._running.cancel()

    def _read(self, made: requests.GenerateCall) -> Generator[generate_pb2.GenerateResponse, None, None]:
        attempts = self._settings.attempts(made.timeout_seconds)
        with self._settings.begin("InferenceService/Generate") as trace:
            self.trace_id = trace.trace_id
            metadata = self._settings.metadata(trace, made.priority)
            while True:
                has_started = False
                self._running = call = self._call(made.request, timeout=attempts.seconds_left, metadata=metadata)
                try:
                    for event in call:
                        if not has_started:
                            has_started, self.request_id = True, event.request_id
                            trace.identify(event.request_id)
                        yield event
                    return
                except grpc.RpcError as error:
                    failure = Cancelled("the request was cancelled here") if call.cancelled() else _error_of(error)
                    pause = None if has_started else attempts.pause_after(failure)
                    if pause is None:
                        raise failure from error
                finally:
                    call.cancel()
                trace.retry(failure, pause)
                time.sleep(pause)


def _open(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *tls.channel_options())
    return grpc.secure_channel(address, tls.channel_credentials(), options=options)


def _error_of(error: Any) -> BatonError:
    """The error that a failed call stands for. grpc.RpcError has the methods of a call, but no type says so."""
    return from_rpc_error(error)
