"""A running generation as its reader sees it: an asynchronous generator that can be closed at any point."""

from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

from services.answer import Finished, Tokens
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.mailbox import Mailbox
from services.engines.pytorch.sequence import Event, Failed, Token

Submit = Callable[[EngineCore], None]
Abort = Callable[[EngineCore], int]


class DecodeStream(AsyncGenerator[Tokens | Finished, None]):
    """Yields what has arrived, all at once; ends after Finished.

    Unlike a generator function's, its `aclose` also gives blocks back that were handed in, if it was never started.
    """

    def __init__(self, loop: EngineLoop, mailbox: Mailbox, submit: Submit, abort: Abort) -> None:
        self._loop = loop
        self._mailbox = mailbox
        self._submit: Submit | None = submit
        self._abort = abort
        self._ending: Event | None = None
        self._ended = False

    async def asend(self, _value: None = None, /) -> Tokens | Finished:
        """The next item. Raises what ended the generation, if it failed."""
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
        """Ends the generation and raises what was thrown."""
        await self._end()
        error = val if isinstance(val, BaseException) else typ
        raise error

    async def aclose(self) -> None:
        """Ends the generation; returns when its blocks are back."""
        await self._end()

    async def _next(self) -> Tokens | Finished:
        if self._submit is not None:
            submit, self._submit = self._submit, None
            await self._loop.call(submit)
        if self._ending is None:
            events = await self._mailbox.take()
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
        self._mailbox.close()
        await self._loop.settle(self._abort)


def _merged(tokens: list[Token]) -> Tokens:
    reports = tuple(token.logprob for token in tokens if token.logprob is not None)
    return Tokens(tuple(token.token_id for token in tokens), reports)


def _outcome(event: Event | None) -> Finished:
    if isinstance(event, Failed):
        raise event.error
    assert isinstance(event, Finished)
    return event
