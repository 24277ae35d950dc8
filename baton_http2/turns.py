"""Waiting for a turn: of calls that begin or end beside others, and of writers whose peer is behind."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from baton_http2.stream import Stream

# To begin a call or to end one takes a router about 0.2 ms, where many come together.
CALLS_A_TURN: Final = 16


class CallTurns:
    """Runs steps of calls in their order, at most `CALLS_A_TURN` in a turn of the loop; others wait for the next turns.

    A step alone runs at once. One whose call has ended while it waited still runs, and has to find out itself.
    """

    def __init__(self) -> None:
        self._left = CALLS_A_TURN
        self._waiting: deque[Callable[[], None]] = deque()

    def run(self, step: Callable[[], None]) -> None:
        """Calls `step`, now or in a later turn. It must not raise."""
        if not self._left:
            self._waiting.append(step)
            return
        self._left -= 1
        if not self._left:
            asyncio.get_running_loop().call_soon(self._next_turn)
        step()

    async def wait(self) -> None:
        """Returns in a turn in which few begin."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> None:
            if not begun.done():
                begun.set_result(None)

        self.run(begin)
        await begun

    def _next_turn(self) -> None:
        self._left = CALLS_A_TURN
        for _ in range(min(CALLS_A_TURN, len(self._waiting))):
            self.run(self._waiting.popleft())


async def wait_until_writable(stream: Stream, size: int) -> None:
    """Waits until a message of so many bytes may be written, or the stream is closed."""
    output = stream.connection
    output.held_bytes += size
    try:
        while not stream.is_writable(size) and not stream.closed:
            await stream.change()
    finally:
        output.held_bytes -= size
