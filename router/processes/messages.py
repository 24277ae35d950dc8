"""The messages between the supervisor and the processes of a router: JSON, by the kind of each message.

Calls in both directions between the supervisor and one process, over a pair of sockets that only they have.
"""

import asyncio
import base64
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Annotated, Any, Final, Literal, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from baton.errors import Unavailable
from baton.inference.v1 import generate_pb2
from rpc.auth.caller import Caller, Role
from runtime.aio import timeout


class Message(BaseModel):
    """A message, by its `kind`."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")


class Done(Message):
    """An answer without content."""

    kind: Literal["done"] = "done"


class Prepared(Message):
    """From a process: it can listen. The answer says that it may: all begin together, for connections stay."""

    kind: Literal["prepared"] = "prepared"


class Listening(Message):
    """From a process: it listens now."""

    kind: Literal["listening"] = "listening"


class Refused(Message):
    """From a process: it ends, because its configuration is wrong."""

    kind: Literal["refused"] = "refused"
    problem: str


class Drain(Message):
    """For a process: it drains and ends; `at_once` cancels what still runs."""

    kind: Literal["drain"] = "drain"
    at_once: bool = False


class AskReport(Message):
    """For a process: its report at /health."""

    kind: Literal["ask_report"] = "ask_report"


class ProcessReport(Message):
    """The report of a process at /health."""

    kind: Literal["report"] = "report"
    report: dict[str, Any]


class AskMetrics(Message):
    """For a process: its metrics."""

    kind: Literal["ask_metrics"] = "ask_metrics"


class Family(Message):
    """One metric with all its samples: name, labels and value."""

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


class ProcessMetrics(Message):
    """The metrics of a process."""

    kind: Literal["metrics"] = "metrics"
    families: list[Family]


class CallerName(Message):
    """The authenticated caller of a call."""

    name: str
    role: Role
    certificate: str = ""

    def caller(self) -> Caller:
        """The same, as calls have it."""
        return Caller(self.name, self.role, self.certificate)


class StopRequests(Message):
    """From a process to the others, and for each of them: stop what runs under a caller's request id."""

    kind: Literal["stop"] = "stop"
    request_id: str
    caller: CallerName | None

    @classmethod
    def of(cls, request_id: str, caller: Caller | None) -> "StopRequests":
        """The message for a caller's request id."""
        named = CallerName(name=caller.name, role=caller.role, certificate=caller.certificate) if caller else None
        return cls(request_id=request_id, caller=named)


class RequestsStopped(Message):
    """The number of the id's requests that ran there, and their workers' serialized CancelReceipts in base64."""

    kind: Literal["stopped"] = "stopped"
    count: int
    receipts: list[str] = []

    @classmethod
    def of(cls, count: int, receipts: Sequence[generate_pb2.CancelReceipt]) -> "RequestsStopped":
        """The message for these receipts."""
        return cls(count=count, receipts=[base64.b64encode(each.SerializeToString()).decode() for each in receipts])

    def messages(self) -> list[generate_pb2.CancelReceipt]:
        """The receipts."""
        return [generate_pb2.CancelReceipt.FromString(base64.b64decode(each)) for each in self.receipts]


AnyMessage = Annotated[
    Done
    | Prepared
    | Listening
    | Refused
    | Drain
    | AskReport
    | ProcessReport
    | AskMetrics
    | ProcessMetrics
    | StopRequests
    | RequestsStopped,
    Field(discriminator="kind"),
]

MESSAGES: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)


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
