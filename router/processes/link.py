"""Calls in both directions between the supervisor and one process, over a pair of sockets that only they have."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final, TypeVar

import structlog

from baton.errors import Unavailable
from router.processes.messages import MESSAGES, AnyMessage, Message
from runtime.aio import timeout

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer", bound=Message)
Respond = Callable[[AnyMessage], Awaitable[AnyMessage]]

# Length, number of the call, and whether this is its answer.
_HEAD: Final = struct.Struct(">IQ?")


class LinkLost(Unavailable):
    """The process at the other end has ended."""


class ProcessLink:
    """One end. `respond` gives the answer to each call of the other end, and must not raise."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, respond: Respond) -> None:
        self._reader = reader
        self._writer = writer
        self._respond = respond
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[AnyMessage]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_lost = False

    @classmethod
    async def over(cls, connected: socket.socket, respond: Respond) -> "ProcessLink":
        """Takes over a connected socket."""
        connected.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=connected)
        return cls(reader, writer, respond)

    async def call(self, question: Message, answer: type[Answer], seconds: float) -> Answer:
        """Asks the other end. Raises LinkLost if it has ended, TimeoutError if it takes longer."""
        if self._is_lost:
            raise LinkLost("the process has ended")
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with timeout(seconds):
                self._send(number, question, is_answer=False)
                found = await waiting
        finally:
            del self._waiting[number]
        if not isinstance(found, answer):
            raise LinkLost(f"the answer to {type(question).__name__} is {type(found).__name__}")
        return found

    async def serve(self) -> None:
        """Reads until the other end has ended. Cancel it to close this end."""
        try:
            while True:
                length, number, is_answer = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                message = MESSAGES.validate_json(await self._reader.readexactly(length))
                if is_answer:
                    self._resolve(number, message)
                else:
                    self._start(number, message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._lose()

    def _resolve(self, number: int, message: AnyMessage) -> None:
        waiting = self._waiting.get(number)
        # The caller has given up, and no longer waits for this answer.
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _start(self, number: int, message: AnyMessage) -> None:
        task = asyncio.create_task(self._answer(number, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, message: AnyMessage) -> None:
        self._send(number, await self._respond(message), is_answer=True)

    def _send(self, number: int, message: Message, *, is_answer: bool) -> None:
        content = message.model_dump_json().encode()
        self._writer.write(_HEAD.pack(len(content), number, is_answer) + content)

    def _lose(self) -> None:
        self._is_lost = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LinkLost("the process has ended"))
        for task in self._tasks:
            task.cancel()
        self._writer.close()
