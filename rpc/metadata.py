"""What travels beside a request: tenant, priority, and the time that is left."""

from typing import Any

from grpc import aio

from rpc.errors import InvalidRequest

TENANT_KEY = "x-baton-tenant"
PRIORITY_KEY = "x-baton-priority"


def tenant(context: "aio.ServicerContext[Any, Any]") -> str:
    """The tenant that the call is for; empty if it names none."""
    return _text(context, TENANT_KEY)


def priority(context: "aio.ServicerContext[Any, Any]") -> int:
    """The call's priority, larger is sooner; 0 if it names none. Raises InvalidRequest if it is not a whole number."""
    text = _text(context, PRIORITY_KEY)
    try:
        return int(text or "0")
    except ValueError:
        raise InvalidRequest.of(PRIORITY_KEY, f"{text!r} is not a whole number") from None


def remaining_seconds(context: "aio.ServicerContext[Any, Any]") -> float | None:
    """How long the caller will still wait; None if it set no deadline."""
    return context.time_remaining()


def _text(context: "aio.ServicerContext[Any, Any]", key: str) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return str(value)
    return ""
