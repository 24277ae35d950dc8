"""An answer for an asynchronous client: read by one task, watched by another if it can be resumed."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from baton.calls import stream, unary
from baton.connection.retry import Resume
from baton.connection.routers import Routers
from baton.connection.settings import Settings
from baton.errors import BatonError, Unavailable
from baton.generation.inquiries import Finding, Inquiries, Question, Reply
from baton.generation.requests import GenerateCall
from baton.generation.resuming import Received, StreamedAnswer
from baton.inference.v1 import generate_pb2

if TYPE_CHECKING:
    from typing_extensions import Self

Value = TypeVar("Value")


class AsyncGeneration(StreamedAnswer):
    """An answer as it arrives: an asynchronous iterator of GenerateResponse: `started`, `token`s, then `finished`.

    `request_id` and `trace_id` are known after the first event. Closing it, or cancelling the task that reads it, stops
    the request. `resumptions` counts how often it went on after a loss, and `handle` resumes it elsewhere.
    """

    def __init__(
        self,
        routers: Routers,
        settings: Settings,
        made: GenerateCall,
        stop: Callable[[str], None],
        inquirer: "AsyncInquirer",
    ) -> None:
        super().__init__(routers, settings, made, stop)
        self._inquirer = inquirer
        self._events = self._read(made)

    def __aiter__(self) -> "Self":
        return self

    async def __anext__(self) -> generate_pb2.GenerateResponse:
        return await anext(self._events)

    async def __aenter__(self) -> "Self":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def text(self) -> str:
        """Reads what is left of the answer, and returns its text; of several answers, that of the first."""
        return "".join([event.token.text async for event in self if event.token.index == 0])

    def cancel(self) -> None:
        """Ends the running call: its reader gets Cancelled."""
        if self._running is not None:
            self._running.cancel()

    async def aclose(self) -> None:
        """Stops the request if it still runs."""
        await self._events.aclose()

    async def _read(self, made: GenerateCall) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        attempts, received = self._settings.attempts(made.timeout_seconds), self._received
        with self._settings.begin("InferenceService/Generate") as trace:
            self.trace_id = trace.trace_id
            metadata = self._settings.metadata(trace, made.priority, is_recorded=made.is_recorded)
            has_started = False
            try:
                while True:
                    present = self._routers.present
                    name, message = received.next_call()
                    self._running = call = self._routers.call(name, message, attempts.seconds_left, metadata)
                    try:
                        async with self._watching(call, present), aclosing(stream(call)) as events:
                            async for event in events:
                                is_shown = received.add(event)
                                if not has_started:
                                    has_started, self.request_id = True, event.request_id
                                    trace.identify(event.request_id)
                                if is_shown:
                                    yield event
                        return
                    except BatonError as error:
                        if received.is_complete:
                            return  # only its status is missing
                        failure = self._failure(error)
                        pause = received.pause_after(failure, attempts.seconds_left)
                        if pause is None and not has_started:
                            pause = attempts.pause_after(failure)
                        if pause is None:
                            raise failure from error.__cause__
                        trace.retry(failure, pause)
                    self._routers.leave(present)
                    if pause:
                        await asyncio.sleep(pause)
            finally:
                if received.handle and not received.is_complete:
                    self._stop(received.handle)

    def _failure(self, error: BatonError) -> BatonError:
        if not self._is_lost:
            return error
        self._is_lost = False
        return Unavailable("the router says nothing, and does not answer")

    @asynccontextmanager
    async def _watching(self, call: Any, router: int) -> AsyncGenerator[None, None]:
        """Watches for a router that hangs while the context is open, if answers can be resumed."""
        if self._settings.resume is None:
            yield
            return
        watching = asyncio.ensure_future(self._watch(call, router))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, call: Any, router: int) -> None:
        received, silence = self._received, self._received.silence
        self._inquirer.meet(router)
        while True:
            pause, began = silence.look_seconds, time.monotonic()
            await asyncio.sleep(pause)
            if silence.seconds_until_due > 0 or silence.was_held_up(time.monotonic() - began - pause):
                continue
            heard_at = silence.heard_at
            is_lost = received.is_resumable and await self._inquirer.is_lost(router, received)
            if is_lost and silence.heard_at == heard_at and received.is_resumable:
                self._is_lost = True
                silence.leave()
                call.cancel()
                return
            silence.postpone()


class AsyncInquirer:
    """Asks routers whether they are lost. Streams of one router that ask at the same time ask once."""

    def __init__(self, routers: Routers, settings: Settings) -> None:
        self._routers = routers
        self._settings = settings
        self._rule = Inquiries(settings.resume or Resume(), len(routers.channels))
        self._meeting: set[asyncio.Future[bool]] = set()
        self._asking: dict[int, asyncio.Future[Finding]] = {}

    def meet(self, router: int) -> None:
        """Learns how long the routers take to answer, if it is not known of this one; does not wait for it."""
        if self._rule.knows(router) or self._meeting:
            return
        for each in range(len(self._routers.channels)):
            meeting = asyncio.ensure_future(self._run(self._rule.meet(each)))
            self._meeting.add(meeting)
            meeting.add_done_callback(self._meeting.discard)

    async def is_lost(self, router: int, received: Received) -> bool:
        """True if this router has to be left, by one of its streams."""
        while not self._rule.is_known_lost(router, received):
            asking, is_own = self._asking.get(router), False
            if asking is None:
                asking, is_own = asyncio.ensure_future(self._run(self._rule.ask(router, received))), True
                self._asking[router] = asking
                asking.add_done_callback(lambda _done: self._asking.pop(router, None))
            finding = await asyncio.shield(asking)
            if is_own or finding is not Finding.SILENT:
                return finding is Finding.LOST
        return True

    async def _run(self, inquiry: Generator[Question, Reply, Value]) -> Value:
        question = next(inquiry)
        while True:
            try:
                question = inquiry.send(await self._ask(question))
            except StopIteration as found:
                value: Value = found.value
                return value

    async def _ask(self, question: Question) -> Reply:
        metadata = self._settings.bare_metadata
        try:
            return await unary(
                self._routers.call(question.method, question.message, question.seconds, metadata, question.router)
            )
        except BatonError as error:
            return error
