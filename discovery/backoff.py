"""Exponential backoff with jitter, and retries until a deadline."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.errors import BatonError, PermissionDenied, Unauthenticated, Unavailable
from runtime.aio import timeout


class Backoff:
    """Waits whose bound doubles, from `first_seconds` to `max_seconds`; each is 50 to 100 % of its bound, at random."""

    def __init__(self, first_seconds: float = 0.1, max_seconds: float = 3.0) -> None:
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._bound = first_seconds
        self._is_retrying = False

    @property
    def is_retrying(self) -> bool:
        """True if an attempt has failed since the last success."""
        return self._is_retrying

    def next_seconds(self) -> float:
        """The seconds to wait before the next attempt."""
        self._is_retrying = True
        bound = self._bound
        self._bound = min(2 * bound, self._max_seconds)
        return bound * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Starts over: the last attempt succeeded."""
        self._bound = self._first_seconds
        self._is_retrying = False


T = TypeVar("T")


async def retry_until(attempt: Callable[[], Awaitable[T]], timeout_seconds: float, lacking: str) -> T:
    """The result of the first attempt that succeeds.

    Raises Unauthenticated and PermissionDenied at once, since retries do not help, and Unavailable when time is up: its
    message has `lacking` and the last attempt's error.
    """
    backoff = Backoff()
    last: BatonError | None = None
    try:
        async with timeout(timeout_seconds):
            while True:
                try:
                    return await attempt()
                except (Unauthenticated, PermissionDenied):
                    raise
                except BatonError as error:
                    last = error
                await asyncio.sleep(backoff.next_seconds())
    except TimeoutError:
        reason = "no answer" if last is None else last.message
        raise Unavailable(f"{lacking} within {timeout_seconds:g} s: {reason}") from last
