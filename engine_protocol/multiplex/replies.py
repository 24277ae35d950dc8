"""The caller's side of one call of a stream: what has come, and its end."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from google.protobuf.message import DecodeError

from baton.errors import Cancelled, DeadlineExceeded, InvalidReply, Unavailable
from engine_protocol.lane import TokenSink

Response = TypeVar("Response")

# A reader that is this far behind has its call paused, and resumed once it has caught up.
_PAUSE_AT = 64
_RESUME_AT = 8
# One that is paused and goes on sending for so long does not heed it.
_MOST_WAITING = 16 * 1024
_NO_MESSAGE = "the peer's answer is not a message of this method"


class Link(Protocol):
    """The stream, as its calls know it."""

    def cancel(self, call: int) -> None:
        """The answer is not wanted any more."""

    def pause(self, call: int, *, is_paused: bool) -> None:
        """The reader is behind, or not any more."""

    def set_sink(self, call: int, sink: TokenSink | None) -> None:
        """Pushes a call's tokens into `sink`, and those that it refuses into the call; with None, all into the call."""


class MultiplexedCall(AsyncIterator[Response], Generic[Response]):
    """A running call: an asynchronous iterator of its responses, or awaited for the only one. Read by one task.

    Raises the error that its status stands for. Tokens go into a sink as they come, without a step of that task.
    """

    def __init__(
        self,
        number: int,
        link: Link,
        parse: Callable[[bytes], Response],
        of_tokens: Callable[[Sequence[int]], Response],
        seconds: float | None,
    ) -> None:
        self._number = number
        self._link = link
        self._parse = parse
        self._of_tokens = of_tokens
        self._arrived: deque[int | bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._sink: TokenSink | None = None
        self._is_over = False
        self._is_paused = False
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    # What the caller does.

    def set_sink(self, sink: TokenSink | None) -> None:
        """Pushes tokens into `sink` while the reader waits for the next response; with None they are responses."""
        if not self._is_over:
            self._sink = sink

    async def __anext__(self) -> Response:
        """The next response; tokens that have come one after another are one."""
        while not self._arrived:
            if self._is_over:
                if self._error is not None:
                    self._raise(self._error)
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            if self._sink is not None:
                self._link.set_sink(self._number, self._sink)
            try:
                await self._reader
            finally:
                self._reader = None
                if self._sink is not None:
                    self._link.set_sink(self._number, None)
        match self._arrived.popleft():
            case int() as token_id:
                response = self._of_tokens([token_id, *self._further_tokens()])
            case message:
                response = self._parsed(message)
        if self._is_paused and len(self._arrived) <= _RESUME_AT:
            self._is_paused = False
            self._link.pause(self._number, is_paused=False)
        return response

    def _further_tokens(self) -> Iterator[int]:
        while self._arrived and isinstance(self._arrived[0], int):
            yield self._arrived.popleft()  # type: ignore[misc]  # that int

    def _parsed(self, message: bytes) -> Response:
        try:
            return self._parse(message)
        except DecodeError as error:
            raise InvalidReply(_NO_MESSAGE) from error

    # Not a coroutine: who waits for an answer is resumed through each of them.
    def __await__(self) -> Generator[Any, None, Response]:
        """The only response. Not by `__anext__`: the message and the end mostly come together."""
        while not self._is_over:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                yield from self._reader
            finally:
                self._reader = None
        if self._error is not None:
            self._raise(self._error)
        last = self._arrived.pop() if self._arrived else None
        if not isinstance(last, bytes):
            raise Unavailable("the call ended without a response")
        return self._parsed(last)

    def _raise(self, error: Exception) -> NoReturn:
        """Raises the error that the call has ended with, once: it refers to what it passes through, and that to us."""
        self._error = None
        try:
            raise error
        finally:
            del error

    def stop(self) -> None:
        """Cancels the call; who reads it finds its end."""
        self.cancel()
        self._error = None

    async def aclose(self) -> None:
        """Cancels the call, if it runs."""
        self.cancel()

    def cancel(self) -> None:
        """Stops the call, if it runs."""
        if not self._is_over:
            self._link.cancel(self._number)
            self.end(Cancelled("the call was cancelled on this side"))

    # What the stream does.

    def fail(self, error: Exception) -> None:
        """Ends the call on this side; its reader raises the error."""
        self._link.cancel(self._number)
        self.end(error)

    def push(self, each: int | bytes) -> None:
        """Adds a token that went into no sink, or a response."""
        self._arrived.append(each)
        if self._reader is not None:
            self._wake()
        elif len(self._arrived) >= _PAUSE_AT and not self._is_over:
            self._pause_or_fail()

    def end(self, error: Exception | None) -> None:
        """The call is over, with an error or without."""
        if self._is_over:
            return
        self._is_over = True
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        # It refers to this call: without it no cycle is left for the garbage collector.
        self._sink = None

    def _pause_or_fail(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._link.pause(self._number, is_paused=True)
        elif len(self._arrived) > _MOST_WAITING:
            self._arrived.clear()
            self.fail(InvalidReply(f"more than {_MOST_WAITING} answers came on a call that is paused"))

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
            if self._sink is not None:
                # What comes from now on waits behind what the reader is woken for.
                self._link.set_sink(self._number, None)

    def _expire(self) -> None:
        if not self._is_over:
            self._link.cancel(self._number)
            self.end(DeadlineExceeded("Deadline Exceeded"))
