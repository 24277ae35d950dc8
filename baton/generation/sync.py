"""An answer for a synchronous client: read by one thread, watched by another if it can be resumed."""

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from baton.connection.retry import Resume
from baton.connection.routers import Routers
from baton.connection.settings import STOP_SECONDS, Settings
from baton.error_details import from_rpc_error
from baton.errors import BatonError, Cancelled, Unavailable
from baton.generation.inquiries import Finding, Inquiries, Question, Reply
from baton.generation.requests import GenerateCall
from baton.generation.resuming import Received, StreamedAnswer
from baton.inference.v1 import generate_pb2

if TYPE_CHECKING:
    from typing_extensions import Self

Value = TypeVar("Value")


class Generation(StreamedAnswer):
    """An answer as it arrives: an iterator of GenerateResponse, one `started`, then `token`s, then one `finished`.

    `request_id` and `trace_id` are known after the first event. Closing it, or dropping it, stops the request.
    `resumptions` counts how often it went on after a loss, and `handle` resumes it elsewhere: see `Resume`.
    """

    def __init__(
        self,
        routers: Routers,
        settings: Settings,
        made: GenerateCall,
        stop: Callable[[str], None],
        inquirer: "Inquirer",
    ) -> None:
        super().__init__(routers, settings, made, stop)
        self.inquirer = inquirer
        self.resume = settings.resume
        self._router = 0  # the number of the one that `_running` is a call of
        self._events = self._read(made)

    def __iter__(self) -> "Self":
        return self

    def __next__(self) -> generate_pb2.GenerateResponse:
        return next(self._events)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def text(self) -> str:
        """Reads what is left of the answer, and returns its text; of several answers, that of the first."""
        return "".join(event.token.text for event in self if event.token.index == 0)

    def close(self) -> None:
        """Stops the request if it still runs. Only for the thread that reads the answer; others call `cancel`."""
        self._events.close()

    def cancel(self) -> None:
        """Stops the request, from any thread; the thread that reads the answer gets the error Cancelled."""
        if self._running is not None:
            self._running.cancel()

    def _read(self, made: GenerateCall) -> Generator[generate_pb2.GenerateResponse, None, None]:
        attempts, received = self._settings.attempts(made.timeout_seconds), self._received
        with self._settings.begin("InferenceService/Generate") as trace, _watching(self):
            self.trace_id = trace.trace_id
            metadata = self._settings.metadata(trace, made.priority, is_recorded=made.is_recorded)
            has_started = False
            try:
                while True:
                    present = self._routers.present
                    name, message = received.next_call()
                    self._router = present
                    self._running = call = self._routers.call(name, message, attempts.seconds_left, metadata)
                    try:
                        for event in call:
                            is_shown = received.add(event)
                            if not has_started:
                                has_started, self.request_id = True, event.request_id
                                trace.identify(event.request_id)
                            if is_shown:
                                yield event
                        return
                    except grpc.RpcError as error:
                        if received.is_complete:
                            return  # only its status is missing
                        failure = self._failure(call, error)
                        pause = received.pause_after(failure, attempts.seconds_left)
                        if pause is None and not has_started:
                            pause = attempts.pause_after(failure)
                        if pause is None:
                            raise failure from error
                    finally:
                        call.cancel()
                    self._routers.leave(present)
                    trace.retry(failure, pause)
                    time.sleep(pause)
            finally:
                if received.handle and not received.is_complete:
                    self._stop(received.handle)

    def _failure(self, call: Any, error: grpc.RpcError) -> BatonError:
        if not call.cancelled():
            return error_of(error)
        if self._is_lost:
            self._is_lost = False
            return Unavailable("the router says nothing, and does not answer")
        return Cancelled("the request was cancelled here")

    def watch(self, pause: float, began: float) -> float:
        """Leaves a router that is lost; called by a thread, after a pause. Returns the seconds until the next call."""
        received, silence, router = self._received, self._received.silence, self._router
        if silence.seconds_until_due <= 0 and not silence.was_held_up(time.monotonic() - began - pause):
            call, heard_at = self._running, silence.heard_at
            is_lost = received.is_resumable and self.inquirer.is_lost(router, received)
            if is_lost and silence.heard_at == heard_at and received.is_resumable:
                self._is_lost = True
                silence.leave()
                call.cancel()
            else:
                silence.postpone()
        return silence.look_seconds


@contextmanager
def _watching(generation: Generation) -> Iterator[None]:
    """Watches for a router that hangs while the context is open, if answers can be resumed."""
    if generation.resume is None:
        yield
        return
    is_over, watched, inquirer = threading.Event(), weakref.ref(generation), generation.inquirer

    def watch() -> None:
        inquirer.meet()
        pause, began = 0.0, time.monotonic()
        while not is_over.wait(pause):
            found = watched()
            if found is None:
                return
            pause, began = found.watch(pause, began), time.monotonic()
            del found

    thread = threading.Thread(target=watch, name="baton-resume", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


class Inquirer:
    """Asks routers whether they are lost. Streams of one router that ask at the same time ask once."""

    def __init__(self, routers: Routers, settings: Settings) -> None:
        self._routers = routers
        self._settings = settings
        self._rule = Inquiries(settings.resume or Resume(), len(routers.channels))
        self._meeting = threading.Lock()
        self._asking = [threading.Lock() for _ in routers.channels]
        self._answered_at = [0.0 for _ in routers.channels]

    def meet(self) -> None:
        """Learns how long the routers take to answer, of those that it is not known of; one stream does for all."""
        if not self._meeting.acquire(blocking=False):
            return
        try:
            for router in range(len(self._asking)):
                if not self._rule.knows(router):
                    self._run(self._rule.meet(router))
        finally:
            self._meeting.release()

    def is_lost(self, router: int, received: Received) -> bool:
        """True if this router has to be left, by one of its streams."""
        asked_at = time.monotonic()
        with self._asking[router]:
            if self._rule.is_known_lost(router, received):
                return True
            if self._answered_at[router] > asked_at:
                return False
            finding = self._run(self._rule.ask(router, received))
            if finding is Finding.ANSWERS:
                self._answered_at[router] = time.monotonic()
            return finding is Finding.LOST

    def _run(self, inquiry: Generator[Question, Reply, Value]) -> Value:
        question = next(inquiry)
        while True:
            try:
                question = inquiry.send(self._ask(question))
            except StopIteration as found:
                value: Value = found.value
                return value

    def _ask(self, question: Question) -> Reply:
        metadata = self._settings.bare_metadata
        try:
            reply: Reply = self._routers.call(
                question.method, question.message, question.seconds, metadata, question.router
            )
        except grpc.RpcError as error:
            return error_of(error)
        except Cancelled as error:
            return error
        return reply


class Stops:
    """Stops answers whose readers have left them."""

    def __init__(self, routers: Routers, settings: Settings) -> None:
        self._routers = routers
        self._metadata = settings.bare_metadata
        self._running: set[Any] = set()

    def stop(self, handle: str) -> None:
        """Ends an answer, without waiting."""
        message = generate_pb2.CancelGenerationRequest(handle=handle)
        method = self._routers.method("InferenceService/CancelGeneration")
        try:
            call = method.future(message, timeout=STOP_SECONDS, metadata=self._metadata)
        except ValueError:  # the client is closed: the answer ends by itself, a little later
            return
        self._running.add(call)
        call.add_done_callback(self._running.discard)

    def wait(self) -> None:
        """Waits a little for those that are on their way."""
        ends_at = time.monotonic() + STOP_SECONDS
        for call in tuple(self._running):
            with suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.exception(max(0.0, ends_at - time.monotonic()))


def error_of(error: Any) -> BatonError:
    """The error that a failed call stands for. grpc.RpcError has the methods of a call, but no type says so."""
    return from_rpc_error(error)
