"""The longest turn of the event loop, and what grew in one turn."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from support.calibration import here

# What an input itself costs, it costs each time; a pause of the machine does not come each time.
ATTEMPTS = 5


@dataclass
class Turns:
    """`longest_seconds` is CPU time of the loop's own thread: other processes and threads add nothing to it."""

    longest_seconds: float = 0.0
    longest: str = ""


@contextmanager
def turns() -> Iterator[Turns]:
    """Measures each callback of the event loop, a step of a task or a reader, while the block runs."""
    measured = Turns()
    plain = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        plain(handle)
        seconds = time.thread_time() - started
        if seconds > measured.longest_seconds:
            measured.longest_seconds, measured.longest = seconds, repr(handle)

    asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]
    try:
        yield measured
    finally:
        asyncio.Handle._run = plain  # type: ignore[method-assign]


async def assert_never_held(seconds: float, attempt: Callable[[], Awaitable[object]]) -> None:
    """Fails if each attempt holds the event loop for `seconds` of CPU time, as of `calibration.here`, or longer."""
    for _ in range(ATTEMPTS):
        with turns() as measured:
            await attempt()
        if measured.longest_seconds < here(seconds):
            return
    raise AssertionError(f"held for {measured.longest_seconds} s of CPU time by {measured.longest}")


@asynccontextmanager
async def each_turn(count: Callable[[], int]) -> AsyncGenerator[list[int], None]:
    """By how much a count grows in each turn of the loop in which it does."""
    loop, grown, before = asyncio.get_running_loop(), [], count()

    def look() -> None:
        nonlocal before, handle
        if count() > before:
            grown.append(count() - before)
        before = count()
        handle = loop.call_soon(look)

    handle = loop.call_soon(look)
    try:
        yield grown
    finally:
        handle.cancel()
