"""A channel whose calls share one stream to their peer. See engine_protocol/multiplex/__init__.py."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from functools import partial
from typing import Any

import grpc
from grpc import aio
from typing_extensions import Self

from baton.engine.v1 import decode_pb2
from baton.engine.v1 import multiplex_pb2 as pb
from baton.errors import BatonError, InvalidReply, Unavailable
from engine_protocol.lane import TokenSink
from engine_protocol.multiplex.metadata import to_messages
from engine_protocol.multiplex.peer_stream import OpenStream, PeerStream, WriteNow, open_on_channel
from engine_protocol.multiplex.replies import MultiplexedCall
from engine_protocol.multiplex.running_calls import RunningCalls
from engine_protocol.multiplex.separate_call import SeparateCall, StreamingCall
from rpc.channels import TracedChannel
from runtime.aio import wait_until_done

# A larger request is a call of its own, so that others do not wait behind it.
_LARGE_BYTES = 256 * 1024
# How much of several requests is put into one message.
_MESSAGE_BYTES = 1024 * 1024
_SECOND = 1_000_000_000  # in nanoseconds
_SERVICE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]
_GIVES_TOKENS = frozenset(
    f"/{_SERVICE.full_name}/{_SERVICE.methods_by_name[name].name}" for name in ("Decode", "Attach")
)


@asynccontextmanager
async def multiplexed(channel: aio.Channel, open_stream: OpenStream | None = None) -> AsyncGenerator[aio.Channel, None]:
    """A channel for unary calls and calls with streams of responses, which all share one stream to the peer.

    The stream is one of `channel`, or what `open_stream` opens. It is opened by the first call. When it is lost, its
    calls end with its error, and the next call opens another one. Calls made within a span carry its context; large
    requests are calls of their own on `channel`. Leaving the context ends the calls that share the stream.
    """
    streams = _Streams(open_stream or partial(open_on_channel, channel))
    try:
        yield TracedChannel(_CallChannel(channel, streams))
    finally:
        await streams.close()


def separate(channel: aio.Channel) -> aio.Channel:
    """A channel whose calls have the face of multiplexed ones, each with a stream of its own."""
    return _CallChannel(channel, None)


class _Streams:
    """The present stream, and how the next one is opened."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open = open_stream
        self._present: _Stream | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}  # in their order, which is that of their ends
        self._is_closed = False

    def present(self) -> "_Stream":
        """A stream that is not known to be lost. Raises Unavailable once the channel is closed."""
        if self._is_closed:
            raise Unavailable("the channel is closed")
        if self._present is None or self._present.is_lost:
            # In variables of its own: the stream outlives the request, and is in no span.
            self._present = Context().run(_Stream, self._open)
            task = Context().run(asyncio.ensure_future, self._present.run())
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)
        return self._present

    async def close(self) -> None:
        """Ends the streams, with Unavailable for the calls that still run."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await wait_until_done(*self._tasks)


class _Stream:
    """One stream: writes what calls ask for, and gives them what comes."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open = open_stream
        self._numbers = itertools.count(1)
        self.calls = RunningCalls()
        self._waiting = [pb.MultiplexRequest()]
        self._waiting_bytes = 0
        self._has_waiting = False
        self._write_at_once: WriteNow | None = None  # unless the task has something to write
        self._is_scheduled = False
        self._wake = asyncio.Event()
        self.is_lost = False

    # What its calls ask.

    def begin(self, path: str, request: bytes) -> pb.CallStart:
        """The message that begins a call, to be filled and sent by `send`; the call itself is added to `calls`."""
        self._waiting_bytes += len(request)
        if self._waiting_bytes > _MESSAGE_BYTES:
            self._waiting.append(pb.MultiplexRequest())
            self._waiting_bytes = len(request)
        self._has_waiting = True
        # In its place: a message that is appended is copied.
        return self._waiting[-1].starts.add(call=next(self._numbers), method=path, request=request)

    def send(self) -> None:
        """Sends what has begun: at once, or at the end of this turn of the loop if something was sent in it already."""
        if self._write_at_once is None:
            self._wake.set()
        elif not self._is_scheduled:
            self._schedule()
            self._write_now()

    def cancel(self, call: int) -> None:
        if self.calls.forget(call):
            self._waiting[-1].cancelled.append(call)
            self._has_waiting = True
            self._schedule()

    def pause(self, call: int, *, is_paused: bool) -> None:
        (self._waiting[-1].paused if is_paused else self._waiting[-1].resumed).append(call)
        self._has_waiting = True
        self._schedule()

    def set_sink(self, call: int, sink: TokenSink | None) -> None:
        """Pushes a call's tokens into `sink`: see Link."""
        self.calls.set_sink(call, sink)

    # Its life.

    async def run(self) -> None:
        """Runs until the stream is lost, or cancelled; then all of its calls have ended."""
        error: BatonError = Unavailable("the stream of calls ended")
        try:
            async with self._open(self.calls.push) as peer:
                writing = asyncio.ensure_future(self._write(peer))
                try:
                    error = await peer.end()
                finally:
                    # Before the stream is closed, which may take a while.
                    self._end_calls(error)
                    writing.cancel()
                    await wait_until_done(writing)
        except Unavailable as unreachable:
            error = unreachable
        finally:
            self._end_calls(error)

    def _schedule(self) -> None:
        """Has what waits written at the end of this turn of the loop."""
        if self._write_at_once is None:
            self._wake.set()
        elif not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_scheduled = False
        if self._has_waiting:
            self._write_now()

    def _write_now(self) -> None:
        write, waiting = self._write_at_once, self._waiting
        while waiting and write is not None and write(waiting[0]):
            del waiting[0]
        if not waiting:
            self._clear_waiting()
            return
        self._write_at_once = None
        self._wake.set()

    async def _write(self, peer: PeerStream) -> None:
        """Writes what waits whenever the peer cannot take it at once."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for message in self._clear_waiting():
                await peer.write(message)
            if not self._wake.is_set():
                self._write_at_once = peer.write_now

    def _clear_waiting(self) -> list[pb.MultiplexRequest]:
        messages, self._waiting, self._waiting_bytes = self._waiting, [pb.MultiplexRequest()], 0
        self._has_waiting = False
        return messages

    def _end_calls(self, error: BatonError) -> None:
        self.is_lost = True
        self.calls.end(error)


class _CallChannel(aio.Channel):
    """Offers the methods of stubs on shared streams, if there are any; everything else is the channel's below.

    Calls with streams of responses are StreamingCalls.
    """

    def __init__(self, channel: aio.Channel, streams: _Streams | None) -> None:
        self._channel = channel
        self._streams = streams

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        """The channel below is not ours."""

    async def close(self, grace: float | None = None) -> None:
        """The channel below is not ours."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The connection's state now."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns when the connection's state is another."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns when it is connected."""
        await self._channel.channel_ready()

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any) -> Any:
        serializer = partial(_serialized, request_serializer)
        alone = self._channel.unary_unary(method, serializer, response_deserializer, **options)
        if self._streams is None:
            return alone
        return self._multiplexed(self._streams, alone, method, request_serializer, response_deserializer)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any) -> Any:
        serializer = partial(_serialized, request_serializer)
        separate_call = self._channel.unary_stream(method, serializer, response_deserializer, **options)

        def alone(request: Any, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> StreamingCall[Any]:
            return SeparateCall(separate_call(request, timeout=timeout, metadata=metadata))

        if self._streams is None:
            return alone
        return self._multiplexed(self._streams, alone, method, request_serializer, response_deserializer)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._channel.stream_unary(*arguments, **options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._channel.stream_stream(*arguments, **options)

    def _multiplexed(
        self,
        streams: _Streams,
        alone: Callable[..., Any],
        path: str,
        request_serializer: Any,
        response_deserializer: Any,
    ) -> Callable[..., Any]:
        """A function that starts calls of a method, as grpc.aio's multi-callables do; `alone` starts large ones."""
        of_tokens = _of_tokens if path in _GIVES_TOKENS else _no_tokens

        def start(request: Any, *, timeout: float | None = None, metadata: Any = None, **_options: Any) -> Any:
            wire = _serialized(request_serializer, request)
            if len(wire) > _LARGE_BYTES:
                return alone(wire, timeout=timeout, metadata=metadata)
            sent = to_messages(metadata or ())
            present = streams.present()
            message = present.begin(path, wire)
            message.metadata.extend(sent)
            if timeout is not None:
                message.timeout.seconds, message.timeout.nanos = divmod(int(timeout * 1e9), _SECOND)
            number = message.call
            call: MultiplexedCall[Any] = MultiplexedCall(number, present, response_deserializer, of_tokens, timeout)
            present.calls.add(number, call)
            present.send()
            return call

        return start


def _serialized(serialize: Callable[[Any], bytes], request: Any) -> bytes:
    """The bytes of a request, which a large one already is: serializing a million ids takes 8 ms."""
    return request if isinstance(request, bytes) else serialize(request)


def _no_tokens(token_ids: Sequence[int]) -> decode_pb2.DecodeResponse:
    raise InvalidReply(f"{len(token_ids)} tokens came for a call that has none")


def _of_tokens(token_ids: Sequence[int]) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(token_ids=token_ids))
