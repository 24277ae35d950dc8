"""Following a value that is cheap to read and does not tell of its changes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

Value = TypeVar("Value")


async def watch(read: Callable[[], Value], interval_seconds: float) -> AsyncGenerator[Value, None]:
    """The value now, and whenever it has changed, looking every `interval_seconds`. Never ends by itself."""
    known = read()
    yield known
    while True:
        await asyncio.sleep(interval_seconds)
        if (value := read()) != known:
            known = value
            yield known
