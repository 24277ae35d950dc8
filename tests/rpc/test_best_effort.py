"""Calls that may fail do so quietly."""

import asyncio
import gc
from typing import Any, NoReturn

import pytest

from baton.errors import Unavailable
from rpc.channels import best_effort


class FailingCall:
    """A unary call that fails a moment later, also if its caller has left."""

    def __await__(self) -> Any:
        return self._fail().__await__()

    def cancel(self) -> bool:
        return False

    async def _fail(self) -> NoReturn:
        await asyncio.sleep(0.05)
        raise Unavailable("no answer")


async def test_a_call_that_a_closed_channel_refuses_at_its_start_has_no_response() -> None:
    def start(seconds: float) -> NoReturn:
        raise Unavailable("the channel is closed")

    response: Any = await best_effort(start, healthy=True)
    assert response is None


async def test_a_call_that_fails_after_its_caller_was_cancelled_twice_is_no_lost_error() -> None:
    lost: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context))
    start: Any = lambda _seconds: FailingCall()  # noqa: E731
    caller = asyncio.ensure_future(best_effort(start, healthy=True))
    for _ in range(2):
        await asyncio.sleep(0.01)
        caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.sleep(0.1)
    gc.collect()
    assert not lost
