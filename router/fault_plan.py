"""The fault plan that a request brings (docs/faults.md): passed on to its workers; a router's part is done here."""

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import structlog

from rpc.errors import PermissionDenied
from rpc.fault_plan import FAULT_KEY, Fault, RouterMoment, parse

log = structlog.get_logger(__name__)

ATTEMPT_KEY = "x-baton-attempt"


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan as it came, and what of it is for routers."""

    text: str
    faults: tuple[Fault, ...]


_PLAN: ContextVar[_Plan | None] = ContextVar("fault_plan", default=None)


def take_plan(context: Any, *, is_allowed: bool) -> None:
    """Notes the plan of the call that this task answers.

    Raises PermissionDenied if it has one and may have none, and InvalidRequest for one that makes no sense.
    """
    text = next((str(value) for key, value in context.invocation_metadata() or () if key == FAULT_KEY), "")
    if text and not is_allowed:
        raise PermissionDenied(f"{FAULT_KEY} is not allowed here: allow_faults is off")
    _PLAN.set(_Plan(text, tuple(fault for fault in parse(text) if fault.role == "router")) if text else None)


def plan_metadata(attempt: int) -> tuple[tuple[str, str], ...]:
    """What a call to a worker carries of it, the `attempt`th of this request to a worker of that role."""
    plan = _PLAN.get()
    return ((FAULT_KEY, plan.text), (ATTEMPT_KEY, str(attempt))) if plan else ()


async def strike(moment: RouterMoment, request_id: str) -> None:
    """Lets happen what is planned for now."""
    plan = _PLAN.get()
    if plan is None:
        return
    for fault in plan.faults:
        if fault.moment == moment and fault.strikes(request_id):
            log.warning("a planned fault", action=fault.action, moment=moment)
            await (asyncio.sleep(fault.seconds) if fault.action == "delay" else asyncio.Event().wait())
