"""Enters and leaves a context in one task, as task groups require; a fixture's two halves run in two tasks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

Value = TypeVar("Value")


@asynccontextmanager
async def in_one_task(context: AbstractAsyncContextManager[Value]) -> AsyncIterator[Value]:
    """The value of `context`, which a task of its own enters and leaves. Its errors are raised here."""
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


@contextmanager
def in_a_thread(context: AbstractAsyncContextManager[Value]) -> Iterator[Value]:
    """The value of `context`, which is entered and left on the event loop of a new thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    whole = in_one_task(context)
    try:
        value = run(whole.__aenter__())
        try:
            yield value
        finally:
            run(whole.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
