"""A running generation for its reader: an asynchronous generator that can be closed at any point.

A request's events, which wait for their reader.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from services.engines.answer import Finished, Tokens
from services.engines.journal.slots import Slot
from services.engines.kv import HeldKv, LentKv
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.kv_cache.held_kv import HeldPrompt, lend
from services.engines.pytorch.sequence import Event, Failed, Held, HeldDecode, Token, TokenSequence
from services.engines.running.generation import Generation


class EventQueue:
    """Events in order, used in the event loop. A reader pulls all waiting events at once."""

    __slots__ = ("_arrived", "_closed", "_events", "listener")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._closed = False
        self.listener: Callable[[], None] | None = None  # is told of each event

    def put(self, event: Event) -> None:
        """Adds an event and wakes the reader."""
        self._events.append(event)
        self._arrived.set()
        if self.listener is not None:
            self.listener()

    def close(self) -> None:
        """Wakes the reader; no more events will come."""
        self._closed = True
        self._arrived.set()

    def pull_now(self) -> list[Event]:
        """All events that are there, perhaps none."""
        events, self._events = self._events, []
        return events

    async def pull(self) -> list[Event]:
        """Returns all waiting events, at least one; none only after `close`."""
        await self._arrived.wait()
        events, self._events = self._events, []
        if not self._closed:
            self._arrived.clear()
        return events


@dataclass(frozen=True, slots=True)
class Queued:
    """A request for the engine's thread, and the queue of its events."""

    sequence: TokenSequence
    events: EventQueue


Submit = Callable[[EngineCore], None]
Abort = Callable[[EngineCore], int]
Prepare = Callable[[], Awaitable[None]]


class DecodeStream(Generation):
    """Yields all events that have arrived; ends after Finished.

    Unlike that of a generator function, `aclose` also frees the reservation's blocks if the generator was never
    started. `prepare` is awaited before the request is submitted.
    """

    def __init__(
        self, loop: EngineLoop, request: Queued, submit: Submit, abort: Abort, prepare: Prepare | None = None
    ) -> None:
        self._loop = loop
        self._events = request.events
        self._sequence = request.sequence
        self._submit: Submit | None = submit
        self._prepare = prepare
        self._abort = abort
        self._ending: Event | None = None
        self._ended = False
        self._held: Held | None = None  # after it has yielded, until it is taken

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
            self._ended = self._held is None
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
        finished = self._outcome(self._ending)
        self._ended = self._held is None
        return ids, finished

    async def yield_next(self) -> None:
        """Ends it at its next token. See Generation."""
        await self._loop.call(lambda core: core.yield_next(self._sequence))

    def pop_held(self) -> HeldKv | None:
        """Its KV after it has yielded, once."""
        held, self._held = self._held, None
        if held is None:
            return None
        self._ended = True
        return HeldPrompt(self._loop, self._sequence, held)

    def outlive(self, slot: Slot) -> None:
        """Has it journaled. See Generation."""
        self._sequence.slot = slot

    async def lend(self, most_tokens: int) -> LentKv | None:
        """Holds its full blocks. See Generation."""
        return await lend(
            self._loop, self._loop.call(lambda core: core.scheduler.loans.lend(self._sequence, most_tokens))
        )

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
        return self._outcome(self._ending)

    def _outcome(self, event: Event | None) -> Finished:
        match event:
            case Failed(error):
                raise error
            case HeldDecode(finished, held):
                self._held = held
                return finished
        assert isinstance(event, Finished)
        return event

    async def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._events.close()
        await self._loop.run_shielded(self._abort)


def _merged(tokens: list[Token]) -> Tokens:
    reports = tuple(token.logprob for token in tokens if token.logprob is not None)
    return Tokens(tuple(token.token_id for token in tokens), reports, tokens[0].prompt_logprobs)
