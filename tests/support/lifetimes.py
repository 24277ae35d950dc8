"""Contexts that are entered and left by one task, as task groups ask for; a fixture's two halves run in two."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

Value = TypeVar("Value")


@asynccontextmanager
async def in_one_task(context: AbstractAsyncContextManager[Value]) -> AsyncIterator[Value]:
    """What `context` gives, entered and left in a task of its own. Its errors are raised here."""
    opened: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
    enough = asyncio.Event()

    async def live() -> None:
        async with context as value:
            opened.set_result(value)
            await enough.wait()

    life = asyncio.ensure_future(live())
    await asyncio.wait((life, opened), return_when=asyncio.FIRST_COMPLETED)
    if not opened.done():
        life.result()
    try:
        yield opened.result()
    finally:
        enough.set()
        await life
