"""Counts running calls, so that a server can wait until the code of each has ended."""

import asyncio
from typing import Any

from rpc.interceptors.behaviour import Behaviour, Context
from runtime.aio import timeout


class RunningCalls:
    """The calls whose code is running: after gRPC has sent a call's status, its `finally` may still run."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """The number of running calls."""
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
        """Waits until no call is running. Raises TimeoutError."""
        async with timeout(timeout_seconds):
            await self._idle.wait()

    def _enter(self) -> None:
        self._count += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()
