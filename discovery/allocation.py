"""The life of an allocated small id, whatever keeps it."""

import structlog

from baton.errors import BatonError
from discovery.renewal import ANSWER_SECONDS, renew_forever
from discovery.retry import retry_until
from runtime.aio import timeout

log = structlog.get_logger(__name__)


class KeptId:
    """An AllocatedId of at most `limit`. Call `begin`, then run `keep` in a task, then call `end`.

    A subclass takes an id by `_take`, renews it by `_renew`, which takes one again if it was lost, and frees it by
    `_free`.
    """

    def __init__(self, limit: int, ttl_seconds: float) -> None:
        self._limit = limit
        self._ttl_seconds = ttl_seconds
        self._value: int | None = None

    @property
    def value(self) -> int:
        assert self._value is not None
        return self._value

    async def begin(self, timeout_seconds: float) -> None:
        """Allocates an id. Raises as `Registry.allocate_id` does."""
        await retry_until(self._take, timeout_seconds, "no id allocated")

    async def keep(self) -> None:
        """Renews it until cancelled, and allocates again if it was lost. Raises nothing."""
        await renew_forever(self._renew, self._ttl_seconds, _report)

    async def end(self) -> None:
        """Frees the id; without an answer, its lease expires."""
        if self._value is None:
            return
        try:
            async with timeout(ANSWER_SECONDS):
                await self._free()
        except (BatonError, TimeoutError) as error:
            log.warning("allocated id left to expire", error=str(error))

    async def _take(self) -> None:
        raise NotImplementedError

    async def _renew(self) -> None:
        raise NotImplementedError

    async def _free(self) -> None:
        raise NotImplementedError


def _report(error: str) -> None:
    log.warning("allocated id not renewed", error=error)
