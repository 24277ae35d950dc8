"""Test requests to an idle engine, since an engine may report that it is healthy and still hang."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from typing_extensions import Self

from baton.errors import BatonError
from runtime.clock import monotonic
from runtime.lasting import lasting

log = structlog.get_logger(__name__)

# A test begins after half of the interval without progress, is late after 0.35 of it more, and so at 0.9 at the latest.
_QUIET_SHARE = 0.5
_PAUSE_SHARE = 0.05
_LATE_SHARE = 0.35
# A test may take this many times as long as the slowest of the recent ones before it is late.
_USUAL_FACTOR = 4.0
_FORGETTING = 0.95


class Canary:
    """Requests one token when the engine has made no progress for half of `interval_seconds`; None disables it.

    It tests a busy engine too, which may hang. `quiet_seconds` returns the seconds since the last progress, or 0 while
    the engine cannot be expected to generate. An async context manager. There are two stages, both without any progress
    of the engine. `is_late`: the test takes far longer than the tests before it did, which is seen within the interval;
    the worker should get no more work, and recovers if the engine answers after all. `is_overdue`: it has waited for
    `patience_seconds`; the engine has failed. Until a first test has been answered, the first stage is the second.
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
        self._slowest_seconds: float | None = None

    async def __aenter__(self) -> Self:
        self._asking = asyncio.create_task(lasting("canary", self._run))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._asking.cancel()
        await asyncio.wait([self._asking])

    @property
    def is_overdue(self) -> bool:
        """True if the engine has failed to answer in time."""
        return self._has_waited(self._patience)

    @property
    def is_late(self) -> bool:
        """True if the engine takes far longer to answer than it did before."""
        if self._interval is None or self._slowest_seconds is None:
            return self.is_overdue
        usual = max(_LATE_SHARE * self._interval, _USUAL_FACTOR * self._slowest_seconds)
        return self._has_waited(min(usual, self._patience))

    def _has_waited(self, seconds: float) -> bool:
        if self._asked_at is None or monotonic() - self._asked_at <= seconds:
            return False
        return self._quiet_seconds() > seconds

    async def _run(self) -> None:
        if self._interval is None:
            return
        quiet = _QUIET_SHARE * self._interval
        while True:
            await asyncio.sleep(max(0.0, quiet - self._quiet_seconds()) or _PAUSE_SHARE * self._interval)
            if self._quiet_seconds() >= quiet:
                await self._ask_once()

    async def _ask_once(self) -> None:
        self._asked_at = began = monotonic()
        try:
            await self._ask()
            slowest = (self._slowest_seconds or 0.0) * _FORGETTING
            self._slowest_seconds = max(slowest, monotonic() - began)
        except BatonError as error:
            # After a fatal error the engine is unhealthy by its own account.
            log.warning("canary failed", error=error.message)
        finally:
            self._asked_at = None
