"""Channels as grpc.aio has them, over Baton's own HTTP/2 client.

grpcio itself has C threads and sockets, which no event loop of ours sees: `rpc.channels.connect` is the one place that
it is replaced at. The calls of a process to another share a connection (shared.py); those of clients have one each. Its
backoff is not simulated.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
from grpc import StatusCode, aio

from baton_http2.aio import timeout as until
from baton_http2.client.call import ClientCall, Status
from baton_http2.client.dialing import ConnectFailed, ServerAddress, open_call
from baton_http2.wire import frames
from baton_http2.wire.hpack import literal
from baton_http2.wire.metadata import encode
from simulation.shared import Connecting, SharedCall

_RETRY_SECONDS = 0.2
_UNSENT_SECONDS = 2e-4
NO_STATUS = "no status has come"
_CANCELLED = Status(StatusCode.CANCELLED, "Locally cancelled by application!")
_NOT_CONNECTED = "failed to connect to all addresses"


class _Address:
    """A ServerAddress whose head has a deadline and metadata."""

    tls, server_name = None, ""

    def __init__(self, address: str, metadata: Any, timeout: float | None) -> None:
        self.address = address
        self._metadata, self._timeout = metadata, timeout

    def head(self, path: str) -> bytes:
        head = ServerAddress(self.address).head(path)
        if self._timeout is not None:
            head += literal(b"grpc-timeout", b"%dm" % max(1, int(self._timeout * 1000)))
        return head + encode(tuple(self._metadata or ()))


class SimulatedCall:
    """One call, with one response or many."""

    def __init__(self, channel: "SimulatedChannel", path: str, parse: Callable[[bytes], Any], options: Any) -> None:
        self._parse = parse
        self._messages: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._status: Status | None = None
        self._call: ClientCall | None = None
        self._window, self._read_seconds = channel.window, channel.read_seconds
        self._task = asyncio.get_running_loop().create_task(self._run(channel, path, **options))
        channel.calls[self] = None
        self._task.add_done_callback(lambda _: channel.calls.pop(self, None))
        # One that is cancelled before its first step runs no `finally`.
        self._task.add_done_callback(lambda _: self._end(_CANCELLED))

    async def _run(
        self, channel: "SimulatedChannel", path: str, request: bytes | None, timeout: Any, metadata: Any, patient: bool
    ) -> None:
        try:
            async with until(None if timeout is None else timeout + channel.patience):
                while True:
                    try:
                        address = _Address(channel.address, metadata, timeout)
                        async with channel.open_call(address, path, self._take) as call:
                            await self._exchange(call, request)
                        return
                    except ConnectFailed as error:
                        if not patient:
                            self._end(Status(StatusCode.UNAVAILABLE, f"{_NOT_CONNECTED}: {error}"))
                            return
                        await asyncio.sleep(_RETRY_SECONDS)
        except (TimeoutError, asyncio.TimeoutError):
            channel.distrust()
            text = NO_STATUS if channel.patience else "Deadline Exceeded"
            self._end(Status(StatusCode.DEADLINE_EXCEEDED, text))
        except asyncio.CancelledError:
            self._end(_CANCELLED)
            raise
        finally:
            self._end(Status(StatusCode.UNKNOWN, "the call ended without a status"))

    async def _exchange(self, call: ClientCall, request: bytes | None) -> None:
        self._call = call
        stream = call._stream
        if self._window:
            stream._output.send(frames.settings({frames.INITIAL_WINDOW_SIZE: self._window}))
        if request is not None:
            await call.write(request)
            while stream._pending and not stream.closed:  # noqa: ASYNC110
                await asyncio.sleep(_UNSENT_SECONDS)  # nothing tells
            if not stream.closed:
                stream._output.send(frames.frame(frames.DATA, frames.END_STREAM, stream.id, b""))
                if isinstance(call, SharedCall):
                    call.has_sent_all = True
        self._end(await call.status)

    def _take(self, message: bytes) -> None:
        self._messages.append(message)
        self._news.set()
        if self._window:
            loop: Any = asyncio.get_running_loop()
            loop.call_later(loop.random.expovariate(1 / self._read_seconds), self._widen, len(message) + 5)

    def _widen(self, size: int) -> None:
        """Gives back a slow reader's window."""
        stream = self._call._stream if self._call else None
        if stream is not None and not stream.closed:
            stream._output.send(frames.window_update(stream.id, size))

    def _end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            self._news.set()

    # What its callers use of grpc.aio's.

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        return self._task.cancel()

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status.code() is StatusCode.CANCELLED

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._task.add_done_callback(lambda _: callback(self))

    async def code(self) -> StatusCode:
        await asyncio.wait([self._task])
        assert self._status is not None
        return self._status.code()

    async def read(self) -> Any:
        """The next message; aio.EOF after the last."""
        async for message in self:
            return message
        return aio.EOF

    async def write(self, message: Any) -> None:
        while self._call is None and self._status is None:  # noqa: ASYNC110
            await asyncio.sleep(_UNSENT_SECONDS)
        if self._status is not None or self._call is None:
            raise asyncio.InvalidStateError("the call is over")
        await self._call.write(message.SerializeToString())

    def __await__(self) -> Any:
        return self._one().__await__()

    async def _one(self) -> Any:
        await self._ended()
        return self._parse(self._messages[0])

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            await self._wait(lambda: bool(self._messages) or self._status is not None)
            if not self._messages:
                break
            yield self._parse(self._messages.popleft())
        await self._ended()

    async def _ended(self) -> None:
        await self._wait(lambda: self._status is not None)
        status = self._status
        assert status is not None
        if status.code() is StatusCode.CANCELLED and status.message.startswith("Locally"):
            raise asyncio.CancelledError
        if status.code() is not StatusCode.OK:
            trailers = aio.Metadata(*status.trailing_metadata())
            raise aio.AioRpcError(status.code(), aio.Metadata(), trailers, details=status.details())

    async def _wait(self, condition: Callable[[], bool]) -> None:
        try:
            while not condition():
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise


class SimulatedChannel(aio.Channel):
    """Calls to one address. `window` is that of a slow reader's streams, in bytes; a message takes it `read_seconds`.

    Calls end here at their deadline, as grpc.aio's do; with `patience` so much later, so that the server ends them.
    Those of one that `shares` have one connection.
    """

    def __init__(
        self,
        address: str,
        window: int = 0,
        patience: float = 0.0,
        read_seconds: float = 0.05,
        *,
        shares: bool = False,
    ) -> None:
        self.patience, self.read_seconds = patience, read_seconds
        self.address = address.removeprefix("dns:///")
        self.window = window
        self.calls: dict[SimulatedCall, None] = {}
        self._shared = Connecting(self.address) if shares else None
        self._is_closed = False

    async def __aenter__(self) -> "SimulatedChannel":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        tasks = [call._task for call in self.calls]
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(tasks)
        if self._shared is not None:
            self._shared.close()

    def open_call(self, address: Any, path: str, push: Callable[[bytes], None]) -> AbstractAsyncContextManager[Any]:
        """A call while the context is open. Raises ConnectFailed."""
        if self._shared is None:
            return open_call(address, path, push)
        return self._shared.open_call(address.head(path), push)

    def distrust(self) -> None:
        """A call has reached its deadline: no other begins on its connection."""
        if self._shared is not None:
            self._shared.leave()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        await asyncio.Event().wait()

    async def channel_ready(self) -> None:
        """It connects with each call."""

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._method(method, request_serializer, response_deserializer)

    unary_stream = unary_unary

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        # Of an iterator the first request, and the end; without one they are written.
        return self._method(method, lambda each: each and request_serializer(next(each)), response_deserializer)

    stream_unary = stream_stream

    def _method(self, path: str, serialize: Any, parse: Any) -> Any:
        def start(
            request: Any = None, *, timeout: Any = None, metadata: Any = None, wait_for_ready: Any = None, **_: Any
        ) -> Any:
            if self._is_closed:
                raise aio.UsageError("Channel is closed.")
            options = {
                "request": serialize(request),
                "timeout": timeout,
                "metadata": metadata,
                "patient": bool(wait_for_ready),
            }
            return SimulatedCall(self, path, parse, options)

        return start


def connect(address: str, _credentials: Any, _options: Any) -> SimulatedChannel:
    """In the place of `rpc.channels.connect`."""
    return SimulatedChannel(address, shares=True)
