"""Counts the calls that run, so that a server's end can wait for the last line of each."""

import asyncio
from typing import Any

from rpc.aio import timeout
from rpc.interceptors.behaviour import Behaviour, Context


class RunningCalls:
    """The calls whose code runs now. gRPC forgets a call when its status is sent; its `finally` may still run then."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """How many there are."""
        return self._count

    def counted(self, _method: str, behaviour: Behaviour) -> Behaviour:
        """Counts the calls of a method."""

        async def counting(request: Any, context: Context) -> Any:
            self._enter()
            try:
                return await behaviour(request, context)
            finally:
                self._leave()

        return counting

    async def ended(self, timeout_seconds: float) -> None:
        """Waits until none runs. Raises TimeoutError."""
        async with timeout(timeout_seconds):
            await self._idle.wait()

    def _enter(self) -> None:
        self._count += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()
