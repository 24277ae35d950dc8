"""The time that a request has left, in all and for each call to a worker."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from router.ledger import Ledger
from rpc.aio import timeout
from rpc.errors import DeadlineExceeded


class Deadline:
    """A request's last moment, counted from its creation. Its error names the stage that the ledger is at.

    `is_callers` says whether the caller set it; otherwise it is our own, and nobody minds a request that it cuts off.
    """

    def __init__(self, seconds: float, ledger: Ledger, *, is_callers: bool = True) -> None:
        self.is_callers = is_callers
        self._ends_at = time.monotonic() + seconds
        self._ledger = ledger

    @property
    def remaining_seconds(self) -> float:
        """What the next call may take."""
        return max(0.0, self._ends_at - time.monotonic())

    @asynccontextmanager
    async def enforced(self) -> AsyncGenerator[None, None]:
        """Stops what runs inside at the last moment, and raises DeadlineExceeded."""
        try:
            async with timeout(self.remaining_seconds):
                yield
        except TimeoutError:
            raise self.exceeded() from None

    def exceeded(self, worker_id: str = "") -> DeadlineExceeded:
        """The error for now."""
        stage = self._ledger.stage_name
        return DeadlineExceeded(f"the deadline passed during {stage}", stage=stage, worker_id=worker_id)
