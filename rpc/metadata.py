"""What travels beside a request."""

from typing import Any

from grpc import aio


def remaining_seconds(context: "aio.ServicerContext[Any, Any]") -> float | None:
    """How long the caller will still wait; None if it set no deadline."""
    return context.time_remaining()
