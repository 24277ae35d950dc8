"""Retries a first call to the registry until it succeeds or time is up."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.errors import BatonError, PermissionDenied, Unauthenticated, Unavailable
from discovery.backoff import Backoff
from runtime.aio import timeout

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
