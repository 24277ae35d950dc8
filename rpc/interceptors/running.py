"""Counts running calls, so that a server can wait until the code of each has ended."""

import asyncio
from typing import Any

from rpc.interceptors.behaviour import Behaviour, Context
from runtime.aio import timeout


class RunningCalls:
    """The calls whose code is running: after gRPC has sent a call's status, its `finally` may still run."""

    def __init__(self) -> None:
        self._count = 0
        self._idle: asyncio.Event | None = None  # for who waits

    @property
    def count(self) -> int:
        """The number of running calls."""
        return self._count

    def counted(self, _method: str, behaviour: Behaviour) -> Behaviour:
        """Counts the calls of a method."""

        async def counting(request: Any, context: Context) -> Any:
            self._count += 1
            try:
                return await behaviour(request, context)
            finally:
                self._leave()

        return counting

    async def ended(self, timeout_seconds: float) -> None:
        """Waits until no call is running. Raises TimeoutError."""
        async with timeout(timeout_seconds):
            self._idle = self._idle or asyncio.Event()
            while self._count:
                self._idle.clear()
                await self._idle.wait()

    def _leave(self) -> None:
        self._count -= 1
        if self._count == 0 and self._idle is not None:
            self._idle.set()
