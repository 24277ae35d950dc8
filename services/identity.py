"""The identity of a worker: its id, roles, model and epoch, and its record in the registry."""

import dataclasses
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from dataclasses import dataclass

import structlog

from baton.errors import Draining, ModelNotFound, RoleMismatch, StaleEpoch
from discovery.pairing import unpaired
from discovery.record import CHECKS_HANDOFFS, KEEPS_STREAMS, TAKES_OVER, UNKNOWN, Location
from discovery.registry import Registration, Registry, WorkerRecord
from engine_protocol.roles import Role
from runtime.aio import timeout

log = structlog.get_logger(__name__)

_PAIRING_SECONDS = 3.0


@dataclass(slots=True)
class Identity:
    """A worker's names. `address`, `offers` and `reads` are set before it registers, and roles may change later."""

    worker_id: str
    roles: tuple[Role, ...]
    model: str
    # The incarnation of the process: later processes have higher epochs, so that a registry can tell which of two
    # records is newer. From Registry.next_epoch, since a host's clock may step back between two processes.
    epoch: int
    address: str = ""
    certificate: str = ""  # the URI baton://worker/NAME in its certificate, if it has one
    offers: tuple[str, ...] | None = None  # transports by which others can read its KV; None if engines move it
    reads: tuple[str, ...] | None = None  # transports by which it reads others' KV; likewise
    location: Location = UNKNOWN
    checks_handoffs: bool = False  # it compares what it pulls with what the owner holds
    keeps_streams: bool = False  # its decodes may go on without their readers
    outlives_process: bool = False  # those that are kept go on in its next process, if this one is lost
    leaving: tuple[Role, ...] = ()  # roles that it loses: it takes work by them, and no router is to send any
    left: frozenset[Role] = frozenset()  # roles that it has lost

    def require_role(self, role: Role) -> None:
        """Raises RoleMismatch naming the worker's roles; Draining for one that it has lost: others have it."""
        if role in self.roles or role in self.leaving:
            return
        if role in self.left:
            raise Draining(f"worker {self.worker_id} does not {role} any more: its roles are {', '.join(self.roles)}")
        raise RoleMismatch(f"worker {self.worker_id} does not {role}: its roles are {', '.join(self.roles)}")

    @property
    def may_have_kept_streams(self) -> bool:
        """True if it decodes or has, since what it keeps outlives the role."""
        return self.keeps_streams and "decode" in {*self.roles, *self.leaving, *self.left}

    @property
    def capabilities(self) -> tuple[str, ...]:
        """For the registry: those that the configuration gives it, beside those of its engines."""
        able = {
            KEEPS_STREAMS: self.may_have_kept_streams,
            TAKES_OVER: self.may_have_kept_streams and self.outlives_process,
            CHECKS_HANDOFFS: self.checks_handoffs,
        }
        return tuple(name for name, is_able in able.items() if is_able)

    def leave(self, roles: tuple[Role, ...]) -> None:
        """Ends these roles, which it was leaving."""
        self.leaving, self.left = (), self.left | set(roles)

    def require_model(self, model: str) -> None:
        """Raises ModelNotFound for another model; an empty name stands for any."""
        if model and model != self.model:
            raise ModelNotFound(f"worker {self.worker_id} does not serve {model!r}: it serves {self.model!r}")

    def require_epoch(self, epoch: int) -> None:
        """Raises StaleEpoch for the epoch of another process."""
        if epoch != self.epoch:
            raise StaleEpoch(f"worker {self.worker_id} is in epoch {self.epoch}; the call is for {epoch}")


class WorkerRegistration:
    """A worker's record in the registry: absent until the worker is ready, then present, then draining."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._record: WorkerRecord | None = None
        self._registration: Registration | None = None
        self._open = AsyncExitStack()

    async def register(self, record: WorkerRecord) -> None:
        """Adds the record. Raises Unavailable if the registry cannot be reached."""
        context: AbstractAsyncContextManager[Registration] = self.registry.register(record)
        self._registration = await self._open.enter_async_context(context)
        self._record = record

    async def drain(self) -> None:
        """Marks the worker as draining, so that routers send it no more work."""
        if self._registration is None or self._record is None or self._record.draining:
            return
        self._record = dataclasses.replace(self._record, draining=True)
        await self._registration.update(self._record)

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record of a worker that is registered; one that drains goes on to."""
        if self._registration is None or self._record is None:
            return
        self._record = dataclasses.replace(record, draining=self._record.draining)
        await self._registration.update(self._record)

    async def withdraw(self) -> None:
        """Removes the record."""
        self._registration = None
        await self._open.aclose()


async def warn_if_unpaired(registry: Registry, record: WorkerRecord) -> None:
    """Logs a warning if no registered worker can exchange KV with this one. Checked once; routers check always."""
    with suppress(TimeoutError):
        async with timeout(_PAIRING_SECONDS), aclosing(registry.watch()) as views:
            async for records in views:
                others = (one for one in records if one.worker_id != record.worker_id)
                if found := unpaired((record, *others)).get(record.process):
                    log.warning(
                        "worker cannot hand over",
                        reason=found.reason,
                        worker_id=record.worker_id,
                        problem=found.problem,
                    )
                return
