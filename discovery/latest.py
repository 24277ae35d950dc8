"""A value for one reader, who gets the newest and may skip earlier ones."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """The newest value, for one reader. Values that it was too slow to read, and repeated values, are dropped."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, value: T) -> None:
        """Replaces the value and wakes the reader."""
        self._values = [value]
        self._changed.set()

    def close(self) -> None:
        """Ends `values` after the newest value."""
        self._closed = True
        self._changed.set()

    async def values(self) -> AsyncGenerator[T, None]:
        """Yields the newest value, at once if there is one, then each time it differs from the last one."""
        seen: list[T] = []
        while not self._closed or self._values != seen:
            if self._values != seen:
                seen = self._values
                yield seen[0]
                continue
            await self._changed.wait()
            self._changed.clear()


async def values_of(latest: Latest[T], producer: Coroutine[Any, Any, None]) -> AsyncGenerator[T, None]:
    """Yields the values that `producer` sets, until it ends; then raises its error. Closing it cancels `producer`."""
    producing = asyncio.create_task(producer)
    producing.add_done_callback(lambda _: latest.close())
    try:
        async with aclosing(latest.values()) as values:
            async for value in values:
                yield value
        await producing
    finally:
        producing.cancel()
        await asyncio.wait({producing})
