"""The first time that something is written to etcd: tried again and again, until it is there or time is up."""

import asyncio
from collections.abc import Awaitable, Callable

from discovery.backoff import Backoff
from rpc.aio import timeout
from rpc.errors import BatonError, PermissionDenied, Unauthenticated, Unavailable


async def insist(attempt: Callable[[], Awaitable[None]], timeout_seconds: float, lacking: str) -> None:
    """Returns once an attempt has succeeded.

    Raises Unauthenticated and PermissionDenied at once, as time would not mend them, and Unavailable when time is up:
    that says what is `lacking`, and what the last attempt raised.
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
