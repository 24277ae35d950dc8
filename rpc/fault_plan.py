"""The faults that a request asks for, to test what its sender makes of them: `x-baton-fault: crash@decode:7`."""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from rpc.errors import InvalidRequest

FAULT_KEY = "x-baton-fault"

Action = Literal["crash", "hang", "freeze", "delay", "drop", "corrupt"]
RouterMoment = Literal["admission", "tokenize", "route", "detokenize"]
WorkerMoment = Literal["queue", "encode", "prefill", "held", "reserve", "pull", "confirm", "decode"]
Moment = Literal[RouterMoment, WorkerMoment]
Role = Literal["router", "encode", "prefill", "decode"]

# On whose process a moment is. All workers have a queue.
_ROLES: dict[Moment, Role] = {
    "admission": "router",
    "tokenize": "router",
    "route": "router",
    "detokenize": "router",
    "encode": "encode",
    "prefill": "prefill",
    "held": "prefill",
    "reserve": "decode",
    "pull": "decode",
    "confirm": "decode",
    "decode": "decode",
}
_TIMED: tuple[Action, ...] = ("delay", "freeze")
# What a router can do to a request without doing it to all others.
_OF_ROUTERS: tuple[Action, ...] = ("delay", "hang")
_CORRUPTIBLE: tuple[Moment, ...] = ("held", "pull")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen, when, and where. `token` is of the moment decode, `seconds` of delay and freeze.

    `attempt` counts how often the request came to a worker of the role; 0 is each time. With a `probability` below 1
    the same seed and request id always decide alike.
    """

    action: Action
    moment: Moment
    role: Role
    token: int = 1
    seconds: float = 0.0
    attempt: int = 1
    probability: float = 1.0
    seed: int = 0

    def strikes(self, request_id: str) -> bool:
        """Whether chance has it that it happens to this request."""
        text = f"{self.seed}\0{request_id}\0{self.action}\0{self.moment}"
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return drawn < self.probability * 2**64


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a plan: `ACTION[=SECONDS]@MOMENT[:TOKEN][;OPTION=VALUE...]`, several parted by commas.

    Raises InvalidRequest naming the metadata key and what is wrong.
    """
    return tuple(_fault(part.strip()) for part in text.split(",") if part.strip())


def _fault(text: str) -> Fault:
    what, *options = (part.strip() for part in text.split(";"))
    action_text, at, moment_text = what.partition("@")
    name, _, seconds = action_text.partition("=")
    place, _, token = moment_text.partition(":")
    if not at or name not in get_args(Action) or place not in get_args(Moment):
        raise _wrong(text, f"expected one of {_listed(Action)}, @, and one of {_listed(Moment)}")
    moment = cast(Moment, place)
    given = dict(option.partition("=")[::2] for option in options)
    if unknown := given.keys() - {"role", "attempt", "p", "seed"}:
        raise _wrong(text, f"{', '.join(sorted(unknown))}: the options are role, attempt, p and seed")
    fault = Fault(
        action=cast(Action, name),
        moment=moment,
        role=_role(text, moment, given.get("role", "")),
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
    if fault.action == "corrupt" and fault.moment not in _CORRUPTIBLE:
        raise _wrong(text, f"only what is {' or '.join(_CORRUPTIBLE)} can be corrupted")


def _role(text: str, moment: Moment, given: str) -> Role:
    own = _ROLES.get(moment)
    for role in get_args(Role):
        if role == (given or own or "prefill") and (own == role or (own is None and role != "router")):
            return cast(Role, role)
    raise _wrong(text, f"{moment} is not a moment of the role {given!r}")


def _number(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise _wrong(text, f"{number!r} is no number") from None
    if not (math.isfinite(value) and value >= 0):
        raise _wrong(text, f"{number} is out of range")
    return value


def _listed(names: object) -> str:
    return ", ".join(get_args(names))


def _wrong(text: str, description: str) -> InvalidRequest:
    return InvalidRequest.of(FAULT_KEY, f"{text!r}: {description}")
