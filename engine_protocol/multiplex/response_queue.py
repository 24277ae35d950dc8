"""The queue of responses of one stream's calls, and the next message made of it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
    """The tokens that one call sends, `count` so far. `done` ends with them, and `has_ended` says so at less cost."""

    __slots__ = ("call", "count", "done", "has_ended", "is_paused", "source")

    def __init__(self, call: int, source: TokenSource, *, is_paused: bool) -> None:
        self.call = call
        self.source: TokenSource | None = source  # until its end is no longer waited for
        self.is_paused = is_paused
        self.has_ended = False
        self.count = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: Exception | None = None) -> None:
        """Notes that the source has given its last ids, or has failed."""
        self.has_ended = True
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
        self._ready: dict[CallTokens, None] = {}
        self._ending: set[int] = set()  # calls whose last tokens were taken, and whose status has not come
        self._wake = asyncio.Event()
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

    def mark_ready(self, tokens: CallTokens) -> None:
        """A source has tokens, or its call was resumed."""
        if not tokens.is_paused:
            if not self._ready:
                self._wake.set()
            self._ready[tokens] = None

    def forget(self, tokens: CallTokens) -> None:
        """The call has ended."""
        self._ready.pop(tokens, None)

    def close(self) -> None:
        """Nothing more is sent."""
        for ended in self._ended:
            ended.record_lost()

    async def send(self, tokens: CallTokens) -> int:
        """Sends the tokens of a call until the last ones. Returns how many. Raises what their source raises."""
        try:
            if tokens.source is not None:
                await tokens.source.subscribe(partial(self.mark_ready, tokens))
                await tokens.done
            return tokens.count
        finally:
            self.forget(tokens)
            # It refers to what it calls when it is ready.
            tokens.source = None

    async def wait_until_writable(self) -> None:
        """Waits while too much waits to be sent."""
        await self._writable.wait()

    async def pull(self) -> Batch:
        """The next message, as soon as there is one."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            calls, ids = self._pull_tokens()
            if calls or self._answers:
                break
        await self._let_calls_end()
        message = pb.MultiplexResponse(token_calls=calls, token_ids=ids, answers=self._answers)
        batch = Batch(message, self._ended)
        self._answers, self._ended, self._bytes = [], [], 0
        self._answered.clear()
        self._writable.set()
        if self._ready:
            self._wake.set()
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
        self._wake.set()
        if self._bytes >= _MESSAGE_BYTES:
            self._writable.clear()

    def _pull_tokens(self) -> tuple[list[int], list[int]]:
        # One loop without a call but the source's: for each token of a step.
        calls: list[int] = []
        all_ids: list[int] = []
        ready, answered = tuple(self._ready), self._answered
        self._ready.clear()
        for tokens in ready:
            source = tokens.source
            if tokens.is_paused or tokens.has_ended or source is None:
                continue  # until it is resumed
            call = tokens.call
            if answered and call in answered:
                # Tokens come before the answers of a message, and these come after an answer.
                self._ready[tokens] = None
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
            count = len(ids)
            tokens.count += count
            all_ids += ids
            if count == 1:
                calls.append(call)
            else:
                calls += (call,) * count
        return calls, all_ids
