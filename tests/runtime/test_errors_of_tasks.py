"""An error that comes out of a task is freed where it is caught, with the task: not by a garbage collection."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from runtime.aio import gather_or_cancel, gather_to_completion, run_to_completion, run_with_background


class Failure(Exception):
    """Of a task."""


async def fail() -> None:
    await asyncio.sleep(0)
    raise Failure


WAYS: dict[str, Callable[[], Awaitable[object]]] = {
    "gather_or_cancel": lambda: gather_or_cancel([fail(), asyncio.sleep(60)]),
    "gather_or_cancel, all fail": lambda: gather_or_cancel([fail(), fail()]),
    "gather_to_completion": lambda: gather_to_completion([fail(), asyncio.sleep(0), fail()]),
    "run_to_completion": lambda: run_to_completion(fail()),
    "run_with_background, the work": lambda: run_with_background(asyncio.sleep(60), fail()),
    "run_with_background, beside it": lambda: run_with_background(fail(), asyncio.sleep(60)),
}


@pytest.mark.parametrize("way", WAYS)
async def test_an_error_is_freed_where_it_is_caught(way: str) -> None:
    gc.disable()
    try:
        try:
            await WAYS[way]()
        except Failure as error:
            left = weakref.ref(error)
        await asyncio.sleep(0)
        assert left() is None
    finally:
        gc.enable()


async def test_all_run_to_their_ends_before_a_failure_is_raised() -> None:
    ended = []

    async def end_late() -> None:
        await asyncio.sleep(0.01)
        ended.append(True)

    with pytest.raises(Failure):
        await gather_to_completion([fail(), end_late()])
    assert ended
