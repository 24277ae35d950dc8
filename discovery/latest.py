"""A value that changes faster than its reader reads: the reader gets the newest."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """The newest value for one reader. Values that it was too busy for are dropped, and so are repetitions."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, value: T) -> None:
        """Replaces the value and wakes the reader."""
        self._values = [value]
        self._changed.set()

    def close(self) -> None:
        """Ends `values` once the reader has the newest one."""
        self._closed = True
        self._changed.set()

    async def values(self) -> AsyncGenerator[T, None]:
        """Yields the newest value, at once if there is one, and then whenever it differs from the last yielded."""
        seen: list[T] = []
        while not self._closed or self._values != seen:
            if self._values != seen:
                seen = self._values
                yield seen[0]
                continue
            await self._changed.wait()
            self._changed.clear()
