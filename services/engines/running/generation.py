"""A running generation for its reader: a generator of tokens, which can be pulled instead, and closed at any point."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType

from baton.errors import EngineFailed, Unsupported
from runtime.aio import wait_until_done
from services.engines.answer import Finished, Tokens
from services.engines.journal.slots import Slot
from services.engines.kv import HeldKv, LentKv


class Generation(AsyncGenerator[Tokens | Finished, None]):
    """Yields tokens and the end, or is subscribed to and pulled, without a task's step for each token: not both.

    Closing it is the abort, in either case.
    """

    @abstractmethod
    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Begins, and calls `ready` on the event loop whenever `pull` has something new; at once, if it has already."""

    @abstractmethod
    def pull(self) -> tuple[Sequence[int], Finished | None]:
        """The new ids, and the end, once it has come. Raises what ended the generation, if it failed."""

    # To go on elsewhere: for engines that say `moves_decodes`.

    async def yield_next(self) -> None:
        """Ends it at its next token, with the reason YIELDED unless that token ends the answer.

        One that waits for blocks ends at once. Until the end is read nothing else changes; once is as good as twice.
        """
        raise Unsupported("this engine cannot hand a running decode over")

    def pop_held(self) -> HeldKv | None:
        """Its KV after it has yielded, once, for a caller that owns it then; None if it had none."""
        return None

    def outlive(self, slot: Slot) -> None:
        """Has it journaled in this slot, before it begins. For engines with a `journal`."""
        del slot
        raise Unsupported("this engine has no journal of its decodes")

    async def lend(self, most_tokens: int) -> LentKv | None:
        """Holds its full blocks within the first `most_tokens` ids while it goes on; None if there are none."""
        del most_tokens
        raise Unsupported("this engine cannot lend the KV of a running decode")


async def _nothing() -> None:
    """Drops nothing: a generator that was never read holds nothing."""


class ClosingStream(Generation):
    """The generation of a generator. Closing it awaits `drop`, for what it runs already before it is read.

    A generator that was never read does not run its own `finally`. Where it is pulled, a task reads it.
    """

    def __init__(
        self, events: AsyncGenerator[Tokens | Finished, None], drop: Callable[[], Awaitable[None]] = _nothing
    ) -> None:
        self._events = events
        self._drop = drop
        self._reading: asyncio.Task[None] | None = None
        self._ids: list[int] = []
        self._end: Finished | None = None
        self._error: Exception | None = None

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
            if self._reading is not None:
                self._reading.cancel()
                await wait_until_done(self._reading)
            await self._events.aclose()
        finally:
            await self._drop()

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Begins to read the generator."""
        self._reading = asyncio.create_task(self._read(ready))

    def pull(self) -> tuple[Sequence[int], Finished | None]:
        """The new tokens, and the end. Raises the generator's error."""
        if self._error is not None:
            raise self._error
        ids, self._ids = self._ids, []
        return ids, self._end

    async def _read(self, ready: Callable[[], None]) -> None:
        try:
            async for event in self._events:
                if isinstance(event, Finished):
                    self._end = event
                else:
                    self._ids += event.ids
                ready()
            if self._end is None:
                raise EngineFailed("the engine's generation ended without its last event")
        except Exception as error:  # whatever it is, who pulls raises it
            self._error = error
            ready()
