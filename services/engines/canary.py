"""Test requests to an idle engine, since an engine may report that it is healthy and still hang."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

import structlog
from typing_extensions import Self

from baton.errors import BatonError
from runtime.lasting import lasting

log = structlog.get_logger(__name__)


class Canary:
    """Requests one token when the engine has made no progress for `interval_seconds`; None disables the canary.

    It tests a busy engine too, which may hang. `quiet_seconds` returns the seconds since the last progress, or 0 while
    the engine cannot be expected to generate. An async context manager. `is_overdue` is true once a test has waited
    `patience_seconds` without any progress of the engine.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[None]],
        quiet_seconds: Callable[[], float],
        interval_seconds: float | None,
        patience_seconds: float,
    ) -> None:
        self._ask = ask
        self._quiet_seconds = quiet_seconds
        self._interval = interval_seconds
        self._patience = patience_seconds
        self._asked_at: float | None = None

    async def __aenter__(self) -> Self:
        self._asking = asyncio.create_task(lasting("canary", self._run))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asking.cancel()
        await asyncio.wait([self._asking])

    @property
    def is_overdue(self) -> bool:
        """Whether the engine has failed to answer in time."""
        if self._asked_at is None or time.monotonic() - self._asked_at <= self._patience:
            return False
        return self._quiet_seconds() > self._patience

    async def _run(self) -> None:
        if self._interval is None:
            return
        while True:
            await asyncio.sleep(max(0.0, self._interval - self._quiet_seconds()) or self._interval / 10)
            if self._quiet_seconds() >= self._interval:
                await self._ask_once()

    async def _ask_once(self) -> None:
        self._asked_at = time.monotonic()
        try:
            await self._ask()
        except BatonError as error:
            # After a fatal error the engine is unhealthy by its own account.
            log.warning("canary failed", error=error.message)
        finally:
            self._asked_at = None
