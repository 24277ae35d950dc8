"""Carries fault plans out, on a worker that allows it. Nothing of this runs for a request without a plan."""

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from rpc.errors import BatonError, HandoffLost, InvalidRequest, PermissionDenied, Unavailable
from rpc.fault_plan import FAULT_KEY, Action, Fault, Moment, WorkerMoment, parse
from services.identity import Role
from services.kv import BlockMemory

log = structlog.get_logger(__name__)

ATTEMPT_KEY = "x-baton-attempt"

Metadata = Iterable[tuple[str, str | bytes]]


class Faults:
    """What is to go wrong with one request on this worker."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = tuple(faults)

    @property
    def token_counts(self) -> Sequence[int]:
        """After how many tokens of the whole answer something happens."""
        return sorted({fault.token for fault in self._faults if fault.moment == "decode"})

    async def strike(self, moment: WorkerMoment, token: int = 1) -> None:
        """Lets happen what is planned for now. Raises what a dropped message would come to in the end."""
        for fault in self._faults:
            if fault.moment == moment and fault.token == token:
                await _carry_out(fault)

    def has(self, action: Action, moment: WorkerMoment) -> bool:
        """Whether the caller is to do something that only it can do."""
        return any((fault.action, fault.moment) == (action, moment) for fault in self._faults)


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class FaultReader:
    """Reads the plan beside a request."""

    is_allowed: bool

    def read(self, metadata: Metadata, role: Role, request_id: str) -> Faults:
        """The faults of this call. Raises PermissionDenied if there are some and none are allowed, InvalidRequest."""
        given = {key: str(value) for key, value in metadata}
        if not given.get(FAULT_KEY):
            return NO_FAULTS
        if not self.is_allowed:
            raise PermissionDenied(f"{FAULT_KEY} is not allowed here: engine.allow_faults is off")
        attempt = _attempt(given.get(ATTEMPT_KEY, "1"))
        faults = [fault for fault in parse(given[FAULT_KEY]) if fault.role == role and fault.attempt in (0, attempt)]
        return Faults(fault for fault in faults if fault.strikes(request_id))


def corrupt(memory: BlockMemory, block_ids: Sequence[int]) -> None:
    """Changes a byte of the last block."""
    writer = memory.write(block_ids[-1:])
    for view in writer.views:
        view[0] ^= 0xFF
    writer.commit()


async def _carry_out(fault: Fault) -> None:
    if fault.action == "corrupt" or (fault.action, fault.moment) == ("drop", "held"):
        return
    log.warning("a planned fault", action=fault.action, moment=fault.moment)
    match fault.action:
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            await asyncio.Event().wait()
        case "freeze":
            # The whole process: nothing answers, health neither. That is what it is for.
            time.sleep(fault.seconds)  # noqa: ASYNC251
        case "delay":
            await asyncio.sleep(fault.seconds)
        case "drop":
            raise _dropped(fault.moment)


def _dropped(moment: Moment) -> BatonError:
    message = f"lost at {moment}, as {FAULT_KEY} says"
    return HandoffLost(message) if moment in ("pull", "confirm") else Unavailable(message)


def _attempt(text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequest.of(ATTEMPT_KEY, f"{text!r} is no number")
    return int(text)
