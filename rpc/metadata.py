"""The metadata of calls between routers and workers."""

from typing import Any

from grpc import aio

# The client's request id, in UTF-8, on a router's call to a worker: for logs and spans only. A worker knows the call by
# an id that the router chose, since ids of clients can be guessed, and used twice.
REQUEST_KEY = "x-baton-request-id-bin"

# How often the request was sent to a worker of this role, from 1: for fault plans.
ATTEMPT_KEY = "x-baton-attempt"


def client_request_id(context: "aio.ServicerContext[Any, Any]") -> str:
    """The client's id of the request that this call belongs to; empty if the call does not carry it."""
    named = next((value for key, value in context.invocation_metadata() or () if key == REQUEST_KEY), b"")
    return named.decode("utf-8", "replace") if isinstance(named, bytes) else ""


# What a call's way here may take longer than its cancellation's.
_ON_THE_WAY_SECONDS = 0.05
# By which gRPC rounds a timeout up before it sends it.
_ROUNDED_SHARE = 0.01


def remaining_seconds(context: "aio.ServicerContext[Any, Any]") -> float | None:
    """The time until the caller's deadline; None if it set none."""
    return context.time_remaining()


def was_left_at_its_deadline(remaining: float | None, elapsed: float) -> bool:
    """True if a caller that cancelled did so because its deadline passed. Times are in seconds, as this side has them.

    The caller's clock started earlier, with a shorter timeout than it sent, so its cancellation may come before the
    deadline passes here.
    """
    return remaining is not None and remaining <= _ON_THE_WAY_SECONDS + _ROUNDED_SHARE * (elapsed + remaining)
