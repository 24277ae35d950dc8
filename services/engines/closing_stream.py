"""A generator for a generation that is already running: closing it aborts the generation, even if it was never read."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType

from services.engines.answer import Finished, Tokens


class ClosingStream(AsyncGenerator[Tokens | Finished, None]):
    """Yields `events`; closing it awaits `drop`. A generator that was never read does not run its own `finally`."""

    def __init__(self, events: AsyncGenerator[Tokens | Finished, None], drop: Callable[[], Awaitable[None]]) -> None:
        self._events = events
        self._drop = drop

    async def asend(self, value: None) -> Tokens | Finished:
        return await self._events.asend(value)

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        error: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Tokens | Finished:
        del error, trace
        return await self._events.athrow(kind)

    async def aclose(self) -> None:
        try:
            await self._events.aclose()
        finally:
            await self._drop()
