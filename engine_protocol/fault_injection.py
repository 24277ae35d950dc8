"""Fault plans in a request's metadata, for tests of failure handling: `x-baton-fault: crash@decode:7`."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

from baton.errors import InvalidRequest
from engine_protocol.roles import Role, role_kinds

FAULT_KEY = "x-baton-fault"

Action = Literal["crash", "hang", "freeze", "delay", "drop", "corrupt"]
RouterPoint = Literal["admission", "tokenize", "route", "detokenize"]
# Of a worker: its role's points, and `queue`, which all have.
InjectionPoint = str
_QUEUE = "queue"
_TIMED: tuple[Action, ...] = ("delay", "freeze")
# The actions that a router can apply to one request without affecting others.
_OF_ROUTERS: tuple[Action, ...] = ("delay", "hang")
_CORRUPTIBLE: tuple[InjectionPoint, ...] = ("held", "lent", "pull")


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault. `token` applies to the point decode, `seconds` to the actions delay and freeze.

    `attempt` is the number of the request's call to a worker of the role, from 1; 0 is every call. With a `probability`
    below 1 the outcome depends only on the seed and the request id.
    """

    action: Action
    point: InjectionPoint
    role: Role
    token: int = 1
    seconds: float = 0.0
    attempt: int = 1
    probability: float = 1.0
    seed: int = 0

    def applies_to(self, request_id: str) -> bool:
        """True if the fault happens to this request, by its probability."""
        text = f"{self.seed}\0{request_id}\0{self.action}\0{self.point}"
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return drawn < self.probability * 2**64


@cache
def points() -> Mapping[InjectionPoint, Role]:
    """The role of the process in which each point occurs; empty for the queue."""
    of_router: dict[str, Role] = dict.fromkeys(get_args(RouterPoint), "router")
    return of_router | {_QUEUE: ""} | {point: kind.name for kind in role_kinds().values() for point in kind.points}


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a plan: `ACTION[=SECONDS]@POINT[:TOKEN][;OPTION=VALUE...]`, separated by commas.

    Raises InvalidRequest, which names the metadata key.
    """
    return tuple(_fault(part.strip()) for part in text.split(",") if part.strip())


def _fault(text: str) -> Fault:
    what, *options = (part.strip() for part in text.split(";"))
    action_text, at, moment_text = what.partition("@")
    name, _, seconds = action_text.partition("=")
    point, _, token = moment_text.partition(":")
    if not at or name not in get_args(Action) or point not in points():
        raise _wrong(text, f"expected one of {', '.join(get_args(Action))}, @, and one of {', '.join(points())}")
    given = dict(option.partition("=")[::2] for option in options)
    if unknown := given.keys() - {"role", "attempt", "p", "seed"}:
        raise _wrong(text, f"{', '.join(sorted(unknown))}: the options are role, attempt, p and seed")
    fault = Fault(
        action=cast(Action, name),
        point=point,
        role=_role(text, point, given.get("role", "")),
        token=int(_number(text, token or "1")),
        seconds=_number(text, seconds or "0"),
        attempt=0 if given.get("attempt") == "any" else int(_number(text, given.get("attempt", "1"))),
        probability=_number(text, given.get("p", "1")),
        seed=int(_number(text, given.get("seed", "0"))),
    )
    _check(text, fault)
    return fault


def _check(text: str, fault: Fault) -> None:
    if (fault.action in _TIMED) != bool(fault.seconds):
        raise _wrong(text, f"delay and freeze need seconds, such as {fault.action}=0.5; the others take none")
    if fault.role == "router" and fault.action not in _OF_ROUTERS:
        raise _wrong(text, f"a router can only {' or '.join(_OF_ROUTERS)}")
    if fault.action == "corrupt" and fault.point not in _CORRUPTIBLE:
        raise _wrong(text, f"only what moves at {', '.join(_CORRUPTIBLE)} can be corrupted")


def _role(text: str, point: InjectionPoint, given: str) -> Role:
    own = points()[point]
    role = given or own or "prefill"
    if own == role or (not own and role in role_kinds()):
        return role
    raise _wrong(text, f"{point} is not a point of the role {given!r}")


def _number(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise _wrong(text, f"{number!r} is not a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise _wrong(text, f"{number} is out of range")
    return value


def _wrong(text: str, description: str) -> InvalidRequest:
    return InvalidRequest.of(FAULT_KEY, f"{text!r}: {description}")
