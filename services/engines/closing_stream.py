"""A generation that runs already, to be read: closing it ends it, also if it was never read."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType

from services.answer import Finished, Tokens


class ClosingStream(AsyncGenerator[Tokens | Finished, None]):
    """Reads `events`; closing it awaits `drop`, for a generator that was never read never runs its `finally`."""

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
