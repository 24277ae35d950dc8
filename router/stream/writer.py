"""Streams the messages of one request to its client, at the client's pace.

`StreamWriter` sends everything that is waiting as one message, and waits for more only if the request asks for that.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from typing_extensions import Self

from baton.errors import SlowReader
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.routing.latency import Clock
from router.stream.messages import ParsedParts
from router.stream.reply import AT_ONCE, Pace, Reply
from router.stream.single_tokens import SingleTokens
from router.text.completion import TokenDelta
from runtime.aio import ended_with, forget_cancellation

# Fills the last message, just before it is sent, since it includes the time that the others took.
FillFinished = Callable[[generate_pb2.Finished], None]

_FLUSH_SECONDS = 1.0


class StreamWriter:
    """Sends the messages of one request. An async context manager: the owner adds, and what is added is sent.

    Where the reply can send at once, nothing waits while the client reads. Otherwise, and while the client is behind, a
    task sends everything that waits as one message. A normal exit waits until everything is written. After a failure
    the waiting messages are still written, for at most a second; after a cancellation they are dropped. Errors from
    writing are raised to the owner, and so is SlowReader if the client has read nothing for `patience_seconds` while it
    is being waited for. `first_token_sent` is called when the first token is written.
    """

    def __init__(
        self,
        request_id: str,
        reply: Reply,
        max_waiting_tokens: int,
        patience_seconds: float = 60.0,
        first_token_sent: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
        pace: Pace = AT_ONCE,
    ) -> None:
        self._request_id = request_id
        self._send = reply.send
        self._send_now = reply.send_now
        self.output = reply.output
        self._max_waiting_tokens = max_waiting_tokens
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._written_at = clock()
        self._due_tokens = min(pace.min_tokens, max_waiting_tokens)
        self._max_delay_seconds = pace.max_delay_seconds
        self._delay: asyncio.TimerHandle | None = None
        self._started: generate_pb2.Started | None = None
        self._fill_finished: FillFinished | None = None
        self._first_token_sent: Callable[[], None] | None = first_token_sent
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[sampling_pb2.TokenLogprob] = []
        self._parsed = ParsedParts()
        self._is_due = True
        self._message = generate_pb2.GenerateResponse(request_id=request_id)
        self.single = SingleTokens(request_id, reply.wire)
        self._closed = False
        self._writer: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._room: asyncio.Event | None = None  # for who waits

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._set_due()
        if self._writer is not None or not self._is_empty:
            self._start_writer()
        writer = self._writer
        if writer is None:
            return
        if isinstance(error, asyncio.CancelledError):
            writer.cancel()
        try:
            if error:
                await asyncio.wait([writer], timeout=_FLUSH_SECONDS)
            else:
                await self._wait_for(writer, writer)
        finally:
            writer.cancel()
        if error is None:
            await writer
        else:
            await asyncio.wait([writer])
            ended_with(writer)

    @property
    def has_room(self) -> bool:
        """Whether `put_now` may be called."""
        if self.single.is_flowing:
            return True
        return len(self._token_ids) < self._max_waiting_tokens and (self._writer is None or not self._writer.done())

    def start(self, started: generate_pb2.Started) -> None:
        """Adds the first message."""
        self._started = started
        self._advance()

    def put_now(self, delta: TokenDelta) -> None:
        """Adds tokens. Only while there is room."""
        self._text += delta.text
        self._token_ids += delta.token_ids
        if delta.logprobs:
            self._logprobs += delta.logprobs
        if delta.reasoning or delta.tool_calls or delta.prompt_logprobs:
            self._parsed.add(delta)
        if not self._is_due:
            self._check_due()
        self._advance()

    def put_token(self, text: str, token_id: int) -> None:
        """Adds one token without its log probability. Only while there is room."""
        if self.single.is_flowing:
            # What `put_now` would do, for each token of a client that reads.
            self.single.send(text, token_id)
        else:
            self.put_now(TokenDelta(text, (token_id,), ()))

    def _flows(self) -> bool:
        """Whether the next single token can be sent here and now; not the first one, and none that waits for others."""
        is_direct = self.single.can_flow and self._writer is None and self._first_token_sent is None
        return is_direct and self._due_tokens <= 1 and self.single.client_reads and self._is_empty

    async def put(self, delta: TokenDelta) -> None:
        """Adds tokens. Waits while the client is too far behind, so that nothing more is read from its worker."""
        self.put_now(delta)
        if not self.has_room and self._writer is not None:
            await self._wait_for_room(self._writer)

    def finish(self, text: str, fill_finished: FillFinished) -> None:
        """Adds the last text and the last message."""
        self._text += text
        self._fill_finished = fill_finished
        self._set_due()
        self._advance()

    def flush(self) -> None:
        """Has what was sent written before this turn of the event loop ends, where the reply can."""
        if self.output is not None:
            self.output.flush_early()

    # When tokens are due.

    def _check_due(self) -> None:
        if len(self._token_ids) >= self._due_tokens:
            self._set_due()
        elif self._delay is None:
            self._delay = asyncio.get_running_loop().call_later(self._max_delay_seconds, self._delay_passed)

    def _set_due(self) -> None:
        self._is_due = True
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None

    def _delay_passed(self) -> None:
        self._set_due()
        # Not by `_advance`, whose errors are the owner's.
        self._start_writer()

    # Sending.

    def _advance(self) -> None:
        """Sends what is due: here and now if the client reads, in a task otherwise."""
        if self._send_now is None or self._writer is not None:
            self._start_writer()
            return
        single = self.single
        while single.client_reads and self._next(self._message):
            single.client_reads = self._send_now(self._message)
        if not single.client_reads and not self._is_empty:
            self._start_writer()
        single.is_flowing = self._flows()

    def _start_writer(self) -> None:
        self.single.is_flowing = False
        if self._writer is None:
            # The time before this was spent waiting for tokens, not for the client.
            self._written_at = self._clock()
            self._writer = asyncio.create_task(self._write())
            self._writer.add_done_callback(forget_cancellation)
        self._wake.set()

    async def _write(self) -> None:
        while True:
            message = generate_pb2.GenerateResponse(request_id=self._request_id)
            if self._next(message):
                self._written_at = self._clock()
                await self._send(message)
                self._written_at = self._clock()
            elif self._send_now is not None:
                # The client has caught up.
                self._writer, self.single.client_reads = None, True
                return
            elif self._closed:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    def _next(self, message: generate_pb2.GenerateResponse) -> bool:
        """Makes `message` the next one that is due; whether there is one."""
        if self._started is not None:
            message.started.CopyFrom(self._started)
            self._started = None
        elif (self._token_ids or self._text or self._parsed.has_any) and self._is_due:
            self._take(message.token)
        elif self._fill_finished is not None:
            fill_finished, self._fill_finished = self._fill_finished, None
            # In place: each copy of a message with so many parts takes microseconds.
            message.finished.SetInParent()
            fill_finished(message.finished)
        else:
            return False
        message.sequence = self.single.sequence
        self.single.sequence += 1
        return True

    def _take(self, delta: generate_pb2.TokenDelta) -> None:
        delta.text = self._text
        delta.token_ids[:] = self._token_ids
        if self._logprobs:
            del delta.logprobs[:]
            delta.logprobs.extend(self._logprobs)
            self._logprobs = []
        elif delta.logprobs:
            del delta.logprobs[:]
        if self._parsed.has_any or delta.reasoning or delta.tool_calls or delta.HasField("prompt_logprobs"):
            self._parsed.move_to(delta)
        self._text = ""
        self._token_ids.clear()
        self._is_due = self._due_tokens <= 1
        if self._room is not None:
            self._room.set()
        if self._first_token_sent is not None:
            self._first_token_sent()
            self._first_token_sent = None

    @property
    def _is_empty(self) -> bool:
        waits = self._started or self._token_ids or self._text or self._fill_finished
        return not (waits or self._parsed.has_any)

    # Waiting for the client.

    async def _wait_for_room(self, writer: "asyncio.Task[None]") -> None:
        self._room = self._room or asyncio.Event()
        while len(self._token_ids) >= self._max_waiting_tokens and not writer.done():
            self._room.clear()
            room = asyncio.ensure_future(self._room.wait())
            try:
                await self._wait_for(room, writer)
            finally:
                room.cancel()
        if writer.done():
            writer.result()

    async def _wait_for(self, progress: "asyncio.Future[Any]", writer: "asyncio.Task[None]") -> None:
        """Waits for `progress` or the end of the writer. Raises SlowReader if the client reads nothing for too long."""
        while True:
            patience = self._written_at + self._patience_seconds - self._clock()
            awaited = {progress, writer}
            done, _ = await asyncio.wait(awaited, timeout=max(0.0, patience), return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if self._clock() - self._written_at >= self._patience_seconds:
                raise SlowReader(f"the client has read nothing for {self._patience_seconds:g} s")
