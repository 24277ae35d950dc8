"""One call of a stream on the server: its task, its deadline, and the context that its servicer sees."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc
import structlog
from grpc import StatusCode, aio

from baton.engine.v1 import multiplex_pb2 as pb
from baton_http2.server.methods import Method
from baton_http2.server.servicer_context import CallContext
from baton_http2.wire.metadata import Metadata, Pairs
from engine_protocol.lane import TokenReply, TokenSource
from engine_protocol.multiplex.metadata import from_messages, to_messages
from engine_protocol.multiplex.response_queue import CallTokens, ResponseQueue
from rpc.interceptors.calls import record_arrival
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

# A servicer that never waits gives way to others after so many messages.
_MESSAGES_A_TURN = 32


class CallOwner(Protocol):
    """The stream, as its calls know it. `stream` is the context of the stream's own call."""

    queue: ResponseQueue
    stream: Any

    def forget(self, call: int) -> None:
        """The call has ended."""


class ServedCall(CallContext):
    """A call, and its context. `run` is its task; `leave` and `pause` are what the caller says."""

    def __init__(self, owner: CallOwner, start: pb.CallStart) -> None:
        super().__init__(from_messages(start.metadata), None)
        self.number = start.call
        self._owner = owner
        self._queue = owner.queue
        self._method: Method | None = None
        self._path = start.method
        self._request = start.request
        self._callbacks: list[Callable[[Any], None]] = []
        self._is_over = self._is_done = False
        self._tokens: CallTokens | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._written = 0
        if start.HasField("timeout"):
            seconds = max(0.0, start.timeout.ToNanoseconds() / 1e9)
            self._deadline_at = monotonic() + seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    # Its life.

    @property
    def is_over(self) -> bool:
        """True if it has a status, or its caller has gone."""
        return self._is_over

    @property
    def is_running(self) -> bool:
        """True if its task has begun and not ended."""
        return self._task is not None

    def start(self, method: Method | None) -> "asyncio.Task[None]":
        """Begins its task. Without a method it ends with UNIMPLEMENTED."""
        self._method = method
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def refuse(self, code: StatusCode, details: str) -> None:
        """Ends it before it has begun."""
        self._finish(code, details)

    def leave(self) -> None:
        """The caller does not want the answer any more."""
        if not self._is_over:
            self._end()
            self._is_cancelled = True
            self._code = StatusCode.CANCELLED
            self._run_callbacks()
        self._cancel()

    def pause(self, *, is_paused: bool) -> None:
        """The caller is behind, or not any more."""
        (self._may_write.clear if is_paused else self._may_write.set)()
        if self._tokens is not None:
            self._tokens.pause(is_paused=is_paused)

    def record_sent(self) -> None:
        """The status is on its way."""
        self._is_done = True
        self._run_callbacks()

    async def _run(self) -> None:
        record_arrival()
        method = self._method
        if method is None:
            self._finish(StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        try:
            response = await method.behaviour(method.deserialize(self._request), self)
            if not method.gives_stream and self.is_ok and not self._is_over:
                self._queue.add(self.number, method.serialize(response))
        except aio.AbortError:
            return
        except asyncio.CancelledError:
            self._finish(StatusCode.CANCELLED, "the call was cancelled")
            raise
        except aio.BaseError:
            # A write after the end.
            self._finish(StatusCode.CANCELLED, "the call was cancelled")
        finally:
            self._finish(self.final_code, self._details, self._trailing)
            self._task = None

    def _finish(self, code: StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        if self._is_over:
            return
        self._end()
        self._code, self._details = code, details
        status = pb.CallStatus(code=code.value[0], message=details, trailers=to_messages(trailing))
        self._queue.end(self.number, status, self)

    def _end(self) -> None:
        self._is_over = True
        self._owner.forget(self.number)
        if self._timer is not None:
            self._timer.cancel()
        if self._tokens is not None:
            self._tokens.close()

    def _expire(self) -> None:
        self._finish(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def record_lost(self) -> None:
        """The status will not be sent."""
        self._is_cancelled = True
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    # Messages.

    async def write(self, message: Any) -> None:
        """Sends a message; waits first while the caller or the stream is behind. Raises aio.UsageError at the end."""
        await self._may_write.wait()
        await self._queue.wait_until_writable()
        if self._is_over:
            raise aio.UsageError("the call is over")
        assert self._method is not None
        self._queue.add(self.number, self._method.serialize(message))
        self._written += 1
        if self._written % _MESSAGES_A_TURN == 0:
            await asyncio.sleep(0)

    def reply(self) -> TokenReply:
        """The way back to the caller: this call itself."""
        return self

    async def write_from(self, source: TokenSource, message_of: Callable[[Sequence[int]], Any]) -> int:
        """Sends the tokens of a source until its last ones, in the messages that the calls of the stream share.

        Returns how many they were.
        """
        del message_of
        if self._is_over:
            raise aio.UsageError("the call is over")
        self._tokens = CallTokens(self._queue, self.number, source, is_paused=not self._may_write.is_set())
        try:
            return await self._tokens.send()
        finally:
            self._tokens = None

    async def read(self) -> Any:
        """Methods with a stream of requests are not multiplexed."""
        raise aio.UsageError("the request is one message")

    async def send_initial_metadata(self, initial_metadata: Pairs) -> None:
        """A multiplexed call has none."""
        del initial_metadata
        raise aio.UsageError("a multiplexed call has no initial metadata")

    # The end, as the servicer says it.

    async def abort(self, code: StatusCode, details: str = "", trailing_metadata: Pairs = ()) -> Any:
        """Ends the call with this status, and raises aio.AbortError."""
        if self._is_over:
            raise aio.UsageError("the call is over")
        self._finish(code, details, tuple(trailing_metadata) or self._trailing)
        raise aio.AbortError("Locally aborted.")

    def set_compression(self, compression: grpc.Compression) -> None:
        """The stream is not compressed."""

    def disable_next_message_compression(self) -> None:
        """No message is compressed."""

    # The call.

    @property
    def path(self) -> str:
        """The method, as /package.Service/Method."""
        return self._path

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls back with this context when the status is on its way, or its caller has gone."""
        self._callbacks.append(callback)
        if self._is_done or self._is_cancelled:
            self._run_callbacks()

    def done(self) -> bool:
        """True if the status is on its way."""
        return self._is_done

    def peer(self) -> str:
        """The caller's address."""
        return str(self._owner.stream.peer())

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """The identities that the caller has proven, by property."""
        found: Mapping[str, Sequence[bytes]] = self._owner.stream.auth_context()
        return found
