"""Streams the messages of one request to its client, at the client's pace."""

import asyncio
from collections.abc import Callable
from typing import Any

from typing_extensions import Self

from baton.errors import SlowReader
from baton.inference.v1 import generate_pb2
from baton_http2.server.reply import Reply
from router.routing.latency import Clock
from router.stream.general import AT_ONCE, FillFinished, Pace, UnsentAnswer
from router.stream.lane import ClientLane
from router.text.completion import TokenDelta
from runtime.aio import ended_with, forget_cancellation
from runtime.clock import monotonic

_FLUSH_SECONDS = 1.0


class StreamWriter:
    """Waits for the client of one request. An async context manager: the owner adds, and what is added is sent.

    Its lane sends what is added while the client reads. While the client is behind, or where the server only has writes
    that wait, a task sends everything that waits as one message. A normal exit waits until everything is written. After
    a failure the waiting messages are still written, for at most a second; after a cancellation they are dropped.
    Errors from writing are raised to the owner, and so is SlowReader if the client has read nothing for
    `patience_seconds` while it is being waited for. `first_token_sent` is called when the first token is written.
    """

    def __init__(
        self,
        request_id: str,
        reply: Reply,
        max_waiting_tokens: int,
        patience_seconds: float = 60.0,
        first_token_sent: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
        pace: Pace = AT_ONCE,
    ) -> None:
        self._request_id = request_id
        self._write = reply.write
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._written_at = clock()
        self._unsent = UnsentAnswer(pace, max_waiting_tokens, self._start_task, first_token_sent)
        self.lane = ClientLane(request_id, reply, self._unsent, max_waiting_tokens, self._start_task)
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None  # of the task
        self._writable: asyncio.Event | None = None  # for who waits

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._closed = True
        self._unsent.set_due()
        if self._task is not None or not self._unsent.is_empty:
            self._start_task()
        try:
            if self._task is not None:
                await self._end(self._task, error)
        finally:
            self.lane.close()
            self._task = None  # its error has frames that know this

    async def _end(self, task: "asyncio.Task[None]", error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            task.cancel()
        try:
            if error:
                await asyncio.wait([task], timeout=_FLUSH_SECONDS)
            else:
                await self._wait_for(task, task)
        finally:
            task.cancel()
        try:
            if error is None:
                await task
            else:
                await asyncio.wait([task])
                ended_with(task)
        finally:
            del task  # the error that it raises has this frame

    def start(self, started: generate_pb2.Started | generate_pb2.Resumed) -> None:
        """Adds the first message."""
        self.lane.start(started)

    def put_now(self, delta: TokenDelta) -> None:
        """Adds tokens. Only while the lane has room."""
        self.lane.put(delta)

    async def put(self, delta: TokenDelta) -> None:
        """Adds tokens. Waits while the client is too far behind, so that nothing more is read from its worker."""
        self.lane.put(delta)
        if self._task is not None and not self.lane.is_writable:
            await self._wait_until_writable(self._task)

    def finish(self, last: TokenDelta, fill_finished: FillFinished) -> None:
        """Adds what was held back until now, and the last message."""
        self.lane.finish(last, fill_finished)

    # The task that writes to a client that is behind.

    def _start_task(self) -> None:
        self.lane.fall_behind()
        if self._task is None or self._wake is None:
            # The time before this was spent waiting for tokens, not for the client.
            self._written_at, self._wake = self._clock(), asyncio.Event()
            self._task = asyncio.create_task(self._write_waiting(self._wake))
            self._task.add_done_callback(forget_cancellation)
        self._wake.set()

    async def _write_waiting(self, wake: asyncio.Event) -> None:
        is_done = False
        try:
            while not is_done:
                await self._write_due()
                if self.lane.wire is not None:
                    self._task, is_done = None, True
                    self.lane.caught_up()
                elif self._closed:
                    is_done = True
                else:
                    wake.clear()
                    await wake.wait()
        finally:
            if not is_done:
                self.lane.lose()

    async def _write_due(self) -> None:
        while True:
            message = generate_pb2.GenerateResponse(request_id=self._request_id)
            if not self.lane.next_message(message):
                return
            if self._writable is not None:
                self._writable.set()
            self._written_at = self._clock()
            await self._write(message)
            self._written_at = self._clock()

    # Waiting for the client.

    async def _wait_until_writable(self, task: "asyncio.Task[None]") -> None:
        self._writable = self._writable or asyncio.Event()
        while not self.lane.is_writable and not task.done():
            self._writable.clear()
            writable = asyncio.ensure_future(self._writable.wait())
            try:
                await self._wait_for(writable, task)
            finally:
                writable.cancel()
        try:
            if task.done():
                task.result()
        finally:
            del task  # the error that it raises has this frame

    async def _wait_for(self, progress: "asyncio.Future[Any]", task: "asyncio.Task[None]") -> None:
        """Waits for `progress` or the end of the task. Raises SlowReader if the client reads nothing for too long."""
        while True:
            patience = self._written_at + self._patience_seconds - self._clock()
            awaited = {progress, task}
            done, _ = await asyncio.wait(awaited, timeout=max(0.0, patience), return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if self._clock() - self._written_at >= self._patience_seconds:
                raise SlowReader(f"the client has read nothing for {self._patience_seconds:g} s")
