"""What travels beside a request."""

from typing import Any

from grpc import aio

# Whose quota a request counts for, and how urgent it is; docs/admission.md.
TENANT_KEY = "x-baton-tenant"
PRIORITY_KEY = "x-baton-priority"

# At the end of an answer, however it ended: a Ledger.
LEDGER_KEY = "x-baton-ledger-bin"


def remaining_seconds(context: "aio.ServicerContext[Any, Any]") -> float | None:
    """How long the caller will still wait; None if it set no deadline."""
    return context.time_remaining()
