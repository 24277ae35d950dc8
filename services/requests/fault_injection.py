"""Injects the faults of a request's fault plan, on a worker that allows it. Requests without a plan are unaffected."""

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from baton.errors import BatonError, HandoffLost, InvalidRequest, PermissionDenied, Unavailable, Unsupported
from engine_protocol.fault_injection import FAULT_KEY, Action, Fault, InjectionPoint, parse
from engine_protocol.roles import Role
from rpc.metadata import ATTEMPT_KEY, REQUEST_KEY
from services.engines.answer import Tokens
from services.engines.kv import BlockMemory

log = structlog.get_logger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]


class Faults:
    """The faults that are planned for one call on this worker."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = tuple(faults)

    @property
    def token_counts(self) -> Sequence[int]:
        """The numbers of generated tokens after which a fault is planned."""
        return sorted({fault.token for fault in self._faults if fault.point == "decode"})

    def split(self, tokens: Tokens, generated: int) -> list[Tokens]:
        """The tokens in pieces, each up to a planned fault, so that those before it are sent first.

        So many tokens were `generated` before.
        """
        cuts = [count - generated for count in self.token_counts if generated < count < generated + len(tokens.ids)]
        if not cuts:
            return [tokens]
        starts, ends = [0, *cuts], [*cuts, len(tokens.ids)]
        pieces = [
            Tokens(tokens.ids[start:end], tokens.logprobs[start:end]) for start, end in zip(starts, ends, strict=True)
        ]
        return [replace(pieces[0], prompt_logprobs=tokens.prompt_logprobs), *pieces[1:]]

    async def inject(self, point: InjectionPoint, token: int = 1) -> None:
        """Injects the faults that are planned for this point. Raises the error that a dropped message leads to."""
        for fault in self._faults:
            if fault.point == point and fault.token == token:
                await _inject(fault)

    def has(self, action: Action, point: InjectionPoint) -> bool:
        """True if a fault is planned that the caller has to carry out itself."""
        return any((fault.action, fault.point) == (action, point) for fault in self._faults)


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class FaultReader:
    """Reads the fault plan in the metadata of a call."""

    is_allowed: bool

    def read(self, metadata: Metadata, role: Role, request_id: str) -> Faults:
        """Returns the faults of this call. Raises InvalidRequest, and PermissionDenied where faults are not allowed."""
        given = {key: str(value) for key, value in metadata if isinstance(value, str)}
        if not given.get(FAULT_KEY):
            return NO_FAULTS
        if not self.is_allowed:
            raise PermissionDenied(f"{FAULT_KEY} is not allowed here: engine.allow_faults is off")
        attempt = _attempt(given.get(ATTEMPT_KEY, "1"))
        faults = [fault for fault in parse(given[FAULT_KEY]) if fault.role == role and fault.attempt in (0, attempt)]
        # Decided by the id that the planner chose, so that the same plan gives the same faults again.
        named = next(
            (
                value.decode("utf-8", "replace")
                for key, value in metadata
                if key == REQUEST_KEY and isinstance(value, bytes)
            ),
            "",
        )
        return Faults(fault for fault in faults if fault.applies_to(named or request_id))


def corrupt(memory: BlockMemory | None, block_ids: Sequence[int]) -> None:
    """Changes a byte of the last block. Raises Unsupported if the engine has no pool."""
    if memory is None:
        raise Unsupported("a fault plan corrupts blocks, and the engine has no pool")
    writer = memory.write(block_ids[-1:])
    for view in writer.views:
        view[0] ^= 0xFF
    writer.commit()


async def _inject(fault: Fault) -> None:
    if fault.action == "corrupt" or (fault.action, fault.point) == ("drop", "held"):
        return
    log.warning("injected fault", action=fault.action, point=fault.point)
    match fault.action:
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            await asyncio.Event().wait()
        case "freeze":
            # Blocks the whole process on purpose: health checks are not answered either.
            time.sleep(fault.seconds)  # noqa: ASYNC251
        case "delay":
            await asyncio.sleep(fault.seconds)
        case "drop":
            raise _dropped(fault.point)


def _dropped(point: InjectionPoint) -> BatonError:
    message = f"lost at {point}, as planned by {FAULT_KEY}"
    return HandoffLost(message) if point in ("pull", "confirm") else Unavailable(message)


def _attempt(text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequest.of(ATTEMPT_KEY, f"{text!r} is not a number")
    return int(text)
