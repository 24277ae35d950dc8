"""The claim under which a worker gives a role up: of a model's workers one at a time, and never the last of a role."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from hashlib import sha256

from baton.errors import RoleMismatch, Unavailable
from discovery.backoff import retry_until
from discovery.registry import Registry, WorkerRecord
from engine_protocol.roles import Role
from runtime.aio import timeout

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
