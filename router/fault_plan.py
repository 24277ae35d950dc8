"""The fault plan that a request brings (docs/faults.md): passed on to its workers where the configuration allows it."""

from contextvars import ContextVar
from typing import Any

from rpc.errors import PermissionDenied

FAULT_KEY = "x-baton-fault"
ATTEMPT_KEY = "x-baton-attempt"

_PLAN: ContextVar[str] = ContextVar("fault_plan", default="")


def take_plan(context: Any, *, is_allowed: bool) -> None:
    """Notes the plan of the call that this task answers. Raises PermissionDenied if it has one and may have none."""
    plan = next((str(value) for key, value in context.invocation_metadata() or () if key == FAULT_KEY), "")
    if plan and not is_allowed:
        raise PermissionDenied(f"{FAULT_KEY} is not allowed here: allow_faults is off")
    _PLAN.set(plan)


def plan_metadata(attempt: int) -> tuple[tuple[str, str], ...]:
    """What a call to a worker carries of it, the `attempt`th of this request to a worker of that role."""
    plan = _PLAN.get()
    return ((FAULT_KEY, plan), (ATTEMPT_KEY, str(attempt))) if plan else ()
