"""The transport of a stream of calls: a channel of grpc.aio, or an HTTP/2 connection of our own."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from google.protobuf.message import DecodeError
from grpc import StatusCode, aio

from baton.calls import stream
from baton.connection.settings import MAX_RECEIVE_BYTES
from baton.engine.v1 import multiplex_pb2 as pb
from baton.engine.v1 import multiplex_pb2_grpc
from baton.error_details import from_rpc_error
from baton.errors import BatonError, Cancelled, InvalidReply, Unavailable
from baton_http2.client.call import ClientCall
from baton_http2.client.dialing import DEFAULT_LIMITS, ConnectFailed, ServerAddress, open_call
from baton_http2.wire.messages import MessageFailure
from rpc.auth.tls import TlsConfig
from rpc.server import ServerKind

# Gets the messages of the stream as they come.
PushResponse = Callable[[pb.MultiplexResponse], None]

# Sends a message at once; False if the peer does not read, and the message has to be written.
WriteNow = Callable[[pb.MultiplexRequest], bool]

_LIMITS: Final = replace(DEFAULT_LIMITS, max_message_bytes=MAX_RECEIVE_BYTES)
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["MultiplexService"]
_PATH: Final = f"/{_SERVICE.full_name}/{_SERVICE.methods_by_name['Multiplex'].name}"


class PeerStream(Protocol):
    """A stream that is open. Its responses are given to a function from the start."""

    async def write(self, message: pb.MultiplexRequest) -> None:
        """Sends a message; waits while the peer does not read. Does nothing once the stream is lost."""

    @property
    def write_now(self) -> WriteNow | None:
        """Sends a message without waiting; None for a stream that cannot."""

    async def end(self) -> BatonError:
        """Waits until the stream is lost, and says why."""


# Opens a stream, which is closed when the context is left. Raises Unavailable.
OpenStream: TypeAlias = Callable[[PushResponse], AbstractAsyncContextManager[PeerStream]]

# How streams to the peer at an address are opened, to which there is a channel already.
StreamDialer: TypeAlias = Callable[[str, aio.Channel], OpenStream]


def stream_dialer(kind: ServerKind, tls: TlsConfig | None) -> StreamDialer:
    """Streams of grpc.aio or of our own, with TLS files that are read now. Raises ConfigError."""
    if kind == "grpcio":
        return lambda _address, channel: partial(open_on_channel, channel)
    context = tls.client_context() if tls else None
    server_name = tls.server_name if tls else ""
    return lambda address, _channel: partial(open_on_connection, ServerAddress(address, context, server_name))


@asynccontextmanager
async def open_on_channel(channel: aio.Channel, push: PushResponse) -> AsyncGenerator["_GrpcioStream", None]:
    """A stream of a channel of grpc.aio."""
    call: Any = multiplex_pb2_grpc.MultiplexServiceStub(channel).Multiplex()  # type: ignore[call-arg]  # written to
    try:
        yield _GrpcioStream(call, push)
    finally:
        call.cancel()


@asynccontextmanager
async def open_on_connection(peer: ServerAddress, push: PushResponse) -> AsyncGenerator["_Http2Stream", None]:
    """A stream on a connection of its own. Raises Unavailable if the peer cannot be reached."""

    def parse(message: bytes) -> None:
        try:
            push(pb.MultiplexResponse.FromString(message))
        except DecodeError:
            call.fail(MessageFailure(StatusCode.INTERNAL, "a response is not a MultiplexResponse"))
        except InvalidReply as error:
            call.fail(MessageFailure(StatusCode.INTERNAL, error.message))

    async with AsyncExitStack() as stack:
        try:
            call = await stack.enter_async_context(open_call(peer, _PATH, parse, _LIMITS))
        except ConnectFailed as error:
            raise Unavailable(str(error)) from error
        yield _Http2Stream(call)


class _GrpcioStream:
    write_now = None

    def __init__(self, call: Any, push: PushResponse) -> None:
        self._call = call
        self._push = push

    async def write(self, message: pb.MultiplexRequest) -> None:
        try:
            await self._call.write(message)
        except (aio.BaseError, asyncio.InvalidStateError):
            # `end` gets to know why.
            return

    async def end(self) -> BatonError:
        try:
            async for response in stream(self._call):
                self._push(response)
        except BatonError as lost:
            return _as_lost(lost)
        return Unavailable("the stream of calls ended")


class _Http2Stream:
    def __init__(self, call: ClientCall) -> None:
        self._call = call

    async def write(self, message: pb.MultiplexRequest) -> None:
        await self._call.write(message.SerializeToString())

    def write_now(self, message: pb.MultiplexRequest) -> bool:
        return self._call.write_now(message.SerializeToString())

    async def end(self) -> BatonError:
        status = await self._call.status
        if status.code() is StatusCode.OK:
            return Unavailable("the stream of calls ended")
        return _as_lost(from_rpc_error(status))


def _as_lost(error: BatonError) -> BatonError:
    """The error that the calls of a lost stream raise: Unavailable, unless the peer refused the stream.

    gRPC says Cancelled when the channel is closed under a stream, and INTERNAL ("Internal error from Core") when the
    connection is lost while a request is written, whatever the reason was.
    """
    if type(error) is BatonError or isinstance(error, Cancelled):
        return Unavailable(f"the stream of calls was lost: {error.message}")
    return error
