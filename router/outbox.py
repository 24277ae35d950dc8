"""The writing side of a stream: whatever waits goes out as one message, and nothing waits for more to come."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from baton.inference.v1 import generate_pb2, sampling_pb2
from typing_extensions import Self

from router.answer import Piece
from rpc.errors import SlowReader

Send = Callable[[generate_pb2.GenerateResponse], Awaitable[None]]

# Makes the last message when it is about to be sent, and not before: it says what all before it took.
Finish = Callable[[], generate_pb2.Finished]

_FLUSH_SECONDS = 1.0


class Outbox:
    """Messages on their way to one client. An async context manager: its task writes, its owner adds.

    Leaving it well waits until all is written. After a failure what waits is still written, for a second at most;
    after a cancellation it is dropped. What writing raises is raised to the owner, and so is SlowReader once the client
    is waited for and has read nothing for `patience_seconds`. `first_token_sent` is called as the first token goes out.
    """

    def __init__(
        self,
        request_id: str,
        send: Send,
        max_waiting_tokens: int,
        patience_seconds: float = 60.0,
        first_token_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._request_id = request_id
        self._send = send
        self._most = max_waiting_tokens
        self._patience_seconds = patience_seconds
        self._written_at = time.monotonic()
        self._started: generate_pb2.Started | None = None
        self._finish: Finish | None = None
        self._first_token_sent: Callable[[], None] | None = first_token_sent
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[sampling_pb2.TokenLogprob] = []
        self._sequence = 0
        self._closed = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._wake.set()
        if isinstance(error, asyncio.CancelledError):
            self._writer.cancel()
        try:
            if error:
                await asyncio.wait([self._writer], timeout=_FLUSH_SECONDS)
            else:
                await self._wait_for(self._writer)
        finally:
            self._writer.cancel()
        if error is None:
            await self._writer
        else:
            await asyncio.gather(self._writer, return_exceptions=True)

    def start(self, started: generate_pb2.Started) -> None:
        """Adds the first message."""
        self._started = started
        self._wake.set()

    async def put(self, piece: Piece) -> None:
        """Adds tokens. Waits while the client is too far behind, so that its worker is not read any further."""
        self._text += piece.text
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._wake.set()
        if len(self._token_ids) >= self._most or self._writer.done():
            await self._wait_for_room()

    def finish(self, text: str, finish: Finish) -> None:
        """Adds the last text and the last message."""
        self._text += text
        self._finish = finish
        self._wake.set()

    async def _wait_for_room(self) -> None:
        while len(self._token_ids) >= self._most and not self._writer.done():
            self._room.clear()
            room = asyncio.ensure_future(self._room.wait())
            try:
                await self._wait_for(room)
            finally:
                room.cancel()
        if self._writer.done():
            self._writer.result()

    async def _wait_for(self, progress: "asyncio.Future[Any]") -> None:
        """Until then, or until the writer ends. Raises SlowReader if meanwhile nothing is read for too long."""
        while True:
            patience = self._written_at + self._patience_seconds - time.monotonic()
            awaited = {progress, self._writer}
            done, _ = await asyncio.wait(awaited, timeout=max(0.0, patience), return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if time.monotonic() - self._written_at >= self._patience_seconds:
                raise SlowReader(f"nothing of the answer was read for {self._patience_seconds:g} s")

    async def _send_next(self, message: generate_pb2.GenerateResponse) -> None:
        # What waits before it has waited for its tokens, and not for its reader.
        self._written_at = time.monotonic()
        await self._send(message)
        self._written_at = time.monotonic()

    async def _write(self) -> None:
        while not (self._closed and self._is_empty):
            await self._wake.wait()
            self._wake.clear()
            if self._started is not None:
                started, self._started = self._started, None
                await self._send_next(self._message(started=started))
            if self._token_ids or self._text:
                message = self._message(token=self._take())
                if self._first_token_sent is not None:
                    self._first_token_sent()
                    self._first_token_sent = None
                await self._send_next(message)
            if self._finish is not None and not self._token_ids and not self._text:
                finish, self._finish = self._finish, None
                await self._send_next(self._message(finished=finish()))

    @property
    def _is_empty(self) -> bool:
        return not (self._started or self._token_ids or self._text or self._finish)

    def _take(self) -> generate_pb2.TokenDelta:
        delta = generate_pb2.TokenDelta(text=self._text, token_ids=self._token_ids, logprobs=self._logprobs)
        self._text, self._token_ids, self._logprobs = "", [], []
        self._room.set()
        return delta

    def _message(
        self,
        started: generate_pb2.Started | None = None,
        token: generate_pb2.TokenDelta | None = None,
        finished: generate_pb2.Finished | None = None,
    ) -> generate_pb2.GenerateResponse:
        message = generate_pb2.GenerateResponse(
            request_id=self._request_id, sequence=self._sequence, started=started, token=token, finished=finished
        )
        self._sequence += 1
        return message
