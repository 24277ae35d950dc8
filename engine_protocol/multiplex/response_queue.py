"""The queue of responses of one stream's calls, and the next message made of it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.engine.v1 import multiplex_pb2 as pb
from engine_protocol.lane import TokenSource

# More in one message makes calls wait that want to send.
_MESSAGE_BYTES = 512 * 1024
# What an answer takes besides its bytes.
_ANSWER_BYTES = 128
# How many turns of the loop a message waits for the ends of calls whose last tokens it has: what a call does after them
# takes a few, and each of its last answers would wake the caller alone.
_TURNS_TO_END = 4


class Ended(Protocol):
    """A call whose status is in the queue."""

    def record_sent(self) -> None:
        """The status is on its way."""

    def record_lost(self) -> None:
        """The status will not be sent."""


class CallTokens:
    """The tokens that one call sends, `count` so far. `done` ends with them.

    Without a `source` none are pulled: while the call is paused, and after the end. It refers to what it calls when it
    has tokens, which is `mark_ready`; `is_ready` until they are pulled.
    """

    __slots__ = ("_queue", "_source", "call", "count", "done", "is_ready", "source")

    def __init__(self, queue: "ResponseQueue", call: int, source: TokenSource, *, is_paused: bool) -> None:
        self._queue = queue
        self._source: TokenSource | None = source
        self.call = call
        self.source = None if is_paused else self._source
        self.is_ready = False
        self.count = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send(self) -> int:
        """Sends the tokens until the last ones. Returns how many. Raises what their source raises."""
        try:
            if self._source is not None:
                await self._source.subscribe(self.mark_ready)
                await self.done
            return self.count
        finally:
            self.close()

    def mark_ready(self) -> None:
        """The source has tokens: those of all calls are pulled together."""
        if not self.is_ready:
            self.is_ready = True
            ready = self._queue.ready
            if not ready:
                self._queue.wake.set()
            ready.append(self)

    def pause(self, *, is_paused: bool) -> None:
        """Pulls none until it is resumed."""
        self.source = None if is_paused else self._source
        if not is_paused:
            self.mark_ready()

    def close(self) -> None:
        """Pulls no more: the call has ended."""
        self.source = self._source = None

    def end(self, error: Exception | None = None) -> None:
        """Notes that the source has given its last ids, or has failed."""
        self.close()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class Batch:
    """A message, and the calls that end with it."""

    message: pb.MultiplexResponse
    ended: Sequence[Ended]


class ResponseQueue:
    """The answers and the ready tokens of all calls of one stream."""

    def __init__(self) -> None:
        self._answers: list[pb.CallAnswer] = []
        self._answered: set[int] = set()
        self._ended: list[Ended] = []
        self._bytes = 0
        self.ready: list[CallTokens] = []
        self._ending: set[int] = set()  # calls whose last tokens were taken, and whose status has not come
        self.wake = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    def add(self, call: int, message: bytes) -> None:
        """Adds a response."""
        self._add(pb.CallAnswer(call=call, message=message), len(message))

    def end(self, call: int, status: pb.CallStatus, ended: Ended) -> None:
        """Adds the end of a call."""
        self._ending.discard(call)
        self._ended.append(ended)
        self._add(pb.CallAnswer(call=call, status=status), status.ByteSize())

    def close(self) -> None:
        """Nothing more is sent."""
        for ended in self._ended:
            ended.record_lost()

    async def wait_until_writable(self) -> None:
        """Waits while too much waits to be sent."""
        await self._writable.wait()

    async def pull(self) -> Batch:
        """The next message, as soon as there is one."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            calls, ids = self._pull_tokens()
            if calls or self._answers:
                break
        await self._let_calls_end()
        message = pb.MultiplexResponse(token_calls=calls, token_ids=ids, answers=self._answers)
        batch = Batch(message, self._ended)
        self._answers, self._ended, self._bytes = [], [], 0
        self._answered.clear()
        self._writable.set()
        if self.ready:
            self.wake.set()
        return batch

    async def _let_calls_end(self) -> None:
        for _ in range(_TURNS_TO_END):
            if not self._ending:
                return
            await asyncio.sleep(0)
        self._ending.clear()

    def _add(self, answer: pb.CallAnswer, size: int) -> None:
        self._answers.append(answer)
        self._answered.add(answer.call)
        self._bytes += size + _ANSWER_BYTES
        self.wake.set()
        if self._bytes >= _MESSAGE_BYTES:
            self._writable.clear()

    def _pull_tokens(self) -> tuple[list[int], list[int]]:
        # One loop without a call but the source's: for each token of a step.
        calls: list[int] = []
        all_ids: list[int] = []
        ready, answered = self.ready, self._answered
        self.ready = []
        for tokens in ready:
            tokens.is_ready = False
            source, call = tokens.source, tokens.call
            if source is None:
                continue
            if answered and call in answered:
                # Tokens come before the answers of a message, and these come after an answer.
                tokens.mark_ready()
                continue
            try:
                ids, end = source.pull()
            except Exception as error:  # of one call, whose servicer raises it: the others of the stream go on
                tokens.end(error)
                self._ending.add(call)
                continue
            if end:
                tokens.end()
                self._ending.add(call)
            if len(ids) == 1:
                tokens.count += 1
                calls.append(call)
                all_ids.append(ids[0])
            else:
                tokens.count += len(ids)
                calls += (call,) * len(ids)
                all_ids += ids
        return calls, all_ids
