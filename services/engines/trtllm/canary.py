"""A request of our own to an engine that has been idle: that it says it is well does not show that it would answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

import structlog
from typing_extensions import Self

from rpc.errors import BatonError

log = structlog.get_logger(__name__)


class Canary:
    """Asks for a token whenever the engine has been idle for `interval_seconds`; None never asks.

    An async context manager. `is_overdue` says that it was asked `patience_seconds` ago and has not answered.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[None]],
        idle_seconds: Callable[[], float],
        interval_seconds: float | None,
        patience_seconds: float,
    ) -> None:
        self._ask = ask
        self._idle_seconds = idle_seconds
        self._interval = interval_seconds
        self._patience = patience_seconds
        self._asked_at: float | None = None

    async def __aenter__(self) -> Self:
        self._asking = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asking.cancel()
        await asyncio.wait([self._asking])

    @property
    def is_overdue(self) -> bool:
        """Whether the engine has failed by not answering."""
        return self._asked_at is not None and time.monotonic() - self._asked_at > self._patience

    async def _run(self) -> None:
        if self._interval is None:
            return
        while True:
            await asyncio.sleep(max(0.0, self._interval - self._idle_seconds()) or self._interval / 10)
            if self._idle_seconds() >= self._interval:
                await self._ask_once()

    async def _ask_once(self) -> None:
        self._asked_at = time.monotonic()
        try:
            await self._ask()
        except BatonError as error:
            # A fatal one is the engine's failure already.
            log.warning("trtllm canary failed", error=error.message)
        finally:
            self._asked_at = None
