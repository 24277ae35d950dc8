"""A decode's events, as the simulated engine hands them out."""

from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from services.engine import Finished, Tokens


class SimulatedStream(AsyncGenerator[Tokens | Finished, None]):
    """Reads `events`; closing it calls `drop`, also if it was never read and the generator therefore never ran."""

    def __init__(self, events: AsyncGenerator[Tokens | Finished, None], drop: Callable[[], None]) -> None:
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
            self._drop()
