"""A running generation for its reader: an asynchronous generator that can be closed at any point."""

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from services.engines.answer import Finished, Tokens
from services.engines.generation import Generation
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.event_queue import EventQueue
from services.engines.pytorch.sequence import Event, Failed, Token

Submit = Callable[[EngineCore], None]
Abort = Callable[[EngineCore], int]
Prepare = Callable[[], Awaitable[None]]


class DecodeStream(Generation):
    """Yields all events that have arrived; ends after Finished.

    Unlike that of a generator function, `aclose` also frees the reservation's blocks if the generator was never
    started. `prepare` is awaited before the request is submitted.
    """

    def __init__(
        self, loop: EngineLoop, events: EventQueue, submit: Submit, abort: Abort, prepare: Prepare | None = None
    ) -> None:
        self._loop = loop
        self._events = events
        self._submit: Submit | None = submit
        self._prepare = prepare
        self._abort = abort
        self._ending: Event | None = None
        self._ended = False

    async def asend(self, _value: None = None, /) -> Tokens | Finished:
        """Returns the next item. Raises the generation's error if it failed."""
        if self._ended:
            raise StopAsyncIteration
        arrived = False
        try:
            item = await self._next()
            arrived = True
        finally:
            if not arrived:
                await self._end()
        if isinstance(item, Finished):
            self._ended = True
        return item

    async def athrow(
        self, typ: Any, val: BaseException | object = None, _tb: TracebackType | None = None, /
    ) -> Tokens | Finished:
        """Ends the generation and raises the given error."""
        await self._end()
        error = val if isinstance(val, BaseException) else typ
        raise error

    async def aclose(self) -> None:
        """Ends the generation; returns when its blocks are free."""
        await self._end()

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Submits the request, and calls `ready` for its events."""
        self._events.listener = ready
        started = False
        try:
            await self._start()
            started = True
        finally:
            if not started:
                await self._end()

    def pull(self) -> tuple[Sequence[int], Finished | None]:
        """The new tokens, and the end. Raises the generation's error if it failed."""
        events = self._events.pull_now()
        if events and not isinstance(events[-1], Token):
            self._ending = events.pop()
        ids = [event.token_id for event in events if isinstance(event, Token)]
        if self._ending is None:
            return ids, None
        finished = _outcome(self._ending)
        self._ended = True
        return ids, finished

    async def _start(self) -> None:
        if self._submit is not None:
            submit, self._submit = self._submit, None
            if self._prepare is not None:
                await self._prepare()
            await self._loop.call(submit)

    async def _next(self) -> Tokens | Finished:
        await self._start()
        if self._ending is None:
            events = await self._events.pull()
            if not events:
                raise StopAsyncIteration
            if not isinstance(events[-1], Token):
                self._ending = events.pop()
            tokens = [event for event in events if isinstance(event, Token)]
            if tokens:
                return _merged(tokens)
        return _outcome(self._ending)

    async def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._events.close()
        await self._loop.run_shielded(self._abort)


def _merged(tokens: list[Token]) -> Tokens:
    reports = tuple(token.logprob for token in tokens if token.logprob is not None)
    return Tokens(tuple(token.token_id for token in tokens), reports, tokens[0].prompt_logprobs)


def _outcome(event: Event | None) -> Finished:
    if isinstance(event, Failed):
        raise event.error
    assert isinstance(event, Finished)
    return event
