"""A change of a worker's role between prefill and decode while it serves: no request ends by it.

The claim under which a worker gives a role up: of a model's workers one at a time, and never the last of a role.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from baton.errors import InvalidRequest, RequestExists, RoleMismatch, Unavailable, Unsupported
from discovery.backoff import retry_until
from discovery.registry import Registry, WorkerRecord
from engine_protocol.roles import Role
from runtime.aio import run_to_completion, timeout
from services.engines.base import Engine
from services.handoff.leases import Lease, LeaseTable
from services.identity import Identity, WorkerRegistration
from services.moving.running import Shedding
from services.requests.calls import Calls

# Longer than the lease of a claim whose holder has died.
_CLAIM_SECONDS = 15.0
_VIEW_SECONDS = 3.0


class RoleClaim:
    """Checks that others have a role and lets a record change, as one step among workers that change at once.

    The claim is an allocated id of the registry, of which a model has one: it is held under a lease.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @asynccontextmanager
    async def giving_up(self, lost: tuple[Role, ...], record: Callable[[], WorkerRecord]) -> AsyncIterator[None]:
        """Holds the claim while the context is open, in which the worker's `record` is written without the lost roles.

        Raises RoleMismatch if no other worker of its model has one of them, and Unavailable if the registry does not
        answer; either may come at the end, too: a holder that stood still for longer than its lease has lost the claim,
        and is the second of two that change. Its caller then takes the roles back.
        """
        async with AsyncExitStack() as stack:
            if lost:
                claiming = partial(self._enter, stack, kind_of(record().model))
                await retry_until(claiming, _CLAIM_SECONDS, "no claim to change a role")
                await self._require_others(lost, record(), is_written=False)
            yield
            if lost:
                await self._require_others(lost, record(), is_written=True)

    async def _enter(self, stack: AsyncExitStack, kind: str) -> None:
        await stack.enter_async_context(self._registry.allocate_id(kind, 1))

    async def _require_others(self, lost: tuple[Role, ...], own: WorkerRecord, *, is_written: bool) -> None:
        others = [one for one in await self._view(own, is_written=is_written) if one.worker_id != own.worker_id]
        had = {role for one in others if one.model == own.model and not one.draining for role in one.roles}
        if missing := set(lost) - had:
            roles = ", ".join(sorted(missing))
            raise RoleMismatch(f"worker {own.worker_id} is the only one of {own.model} with the role {roles}")

    async def _view(self, own: WorkerRecord, *, is_written: bool) -> tuple[WorkerRecord, ...]:
        """The registered workers, now or once this one's record is among them."""
        try:
            async with timeout(_VIEW_SECONDS), aclosing(self._registry.watch()) as views:
                async for records in views:
                    if not is_written or any(one.process == own.process and one.roles == own.roles for one in records):
                        return records
        except TimeoutError:
            pass
        raise Unavailable("the registry does not show the change of the role")


def kind_of(model: str) -> str:
    """The kind of the id that is claimed for a model, whose name may hold what no key may."""
    return f"role-change-{sha256(model.encode()).hexdigest()[:32]}"


_EXCHANGED = ("prefill", "decode")
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RoleProgress:
    """The work of the lost role that is left before a change of roles ends."""

    running: int
    handoffs_held: int
    changed: bool = False


class RoleChanger:
    """Changes the role of a worker: it takes new work by the new one, and what it has by the old one ends or moves.

    `record` makes the worker's record from its identity.
    """

    def __init__(
        self,
        identity: Identity,
        registration: WorkerRegistration,
        record: Callable[[], WorkerRecord],
        calls: Calls,
        leases: LeaseTable,
    ) -> None:
        self._identity = identity
        self._registration = registration
        self._claim = RoleClaim(registration.registry)
        self._record = record
        self._calls = calls
        self._leases = leases
        self._is_changing = False

    async def change(self, role: str, engine: Engine | None, shedding: Shedding) -> AsyncGenerator[RoleProgress, None]:
        """Yields the progress, now and after every change, until nothing of a lost role is left.

        Raises InvalidRequest for another role, Unsupported if the engine cannot move its decodes, RequestExists while a
        change is running, and as RoleClaim does. If it is closed before its end, the roles are as before.
        """
        if role not in _EXCHANGED:
            raise InvalidRequest.of("role", f"is {role!r:.40}; expected {' or '.join(_EXCHANGED)}")
        if engine is None or not engine.moves_decodes:
            raise Unsupported("the engine of this worker cannot change between prefill and decode")
        before = self._identity.roles
        lost = tuple(one for one in before if one in _EXCHANGED and one != role)
        if role in before and not lost:
            yield RoleProgress(0, 0, changed=True)
            return
        roles = (*(one for one in before if one not in _EXCHANGED), role)
        with self._changing():
            async with self._announced(roles, lost):
                with shedding.shedding_all(is_needed="decode" in lost):
                    async with aclosing(self._emptied(lost)) as stages:
                        async for progress in stages:
                            yield progress
            self._identity.leave(lost)
        yield RoleProgress(0, 0, changed=True)

    @asynccontextmanager
    async def _announced(self, roles: tuple[Role, ...], lost: tuple[Role, ...]) -> AsyncIterator[None]:
        """The worker has these roles and leaves the lost ones; if the context fails, all is as before."""
        before = self._identity.roles
        try:
            async with self._claim.giving_up(lost, self._record):
                await self._announce(roles, leaving=lost)
            yield
        except BaseException:
            await run_to_completion(self._announce(before, leaving=()))
            raise

    async def _emptied(self, lost: tuple[Role, ...]) -> AsyncGenerator[RoleProgress, None]:
        known: RoleProgress | None = None
        left: set[Lease] = set()
        was_running = True
        while True:
            running, held = sum(map(self._calls.count, lost)), set(self._leases.held)
            # What comes after the last call of the lost role is of the new one, and under load never ends.
            left = held if was_running else left & held
            was_running = running > 0
            progress = RoleProgress(running, len(left))
            if not progress.running and not progress.handoffs_held:
                return
            if progress != known:
                yield progress
                known = progress
            await asyncio.sleep(_POLL_SECONDS)

    async def _announce(self, roles: tuple[Role, ...], leaving: tuple[Role, ...]) -> None:
        self._identity.roles, self._identity.leaving = roles, leaving
        await self._registration.update(self._record())

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if self._is_changing:
            raise RequestExists("a change of this worker's role is running")
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False
