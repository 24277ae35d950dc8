"""How late the event loop is: what blocks it holds up every request of the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rpc.metrics import EVENT_LOOP_LAG

_INTERVAL_SECONDS = 0.25


@asynccontextmanager
async def watched_event_loop() -> AsyncIterator[None]:
    """Measures the lag of this event loop for as long as the context is open."""
    task = asyncio.create_task(_watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _watch() -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _INTERVAL_SECONDS
        await asyncio.sleep(_INTERVAL_SECONDS)
        EVENT_LOOP_LAG.observe(max(0.0, loop.time() - due))
