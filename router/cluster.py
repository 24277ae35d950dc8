"""The workers that a router knows: those in the registry's last view, each one watched by the router itself."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
from baton.engine.v1 import worker_pb2

from discovery.latest import Latest
from discovery.registry import Registry, WorkerRecord
from router import metrics
from router.config import ProbeConfig
from router.model import ServedModel
from router.worker import Worker, connect
from rpc.aio import TaskGroup
from rpc.channels import Dial
from rpc.errors import EngineFailed, InvalidRequest, ModelNotFound, NoWorker

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Member:
    """A worker of one epoch, from its first record until it is let go."""

    record: WorkerRecord
    worker: Worker | None = None
    leave: asyncio.Event = field(default_factory=asyncio.Event)


class Cluster:
    """The workers of a namespace and the models they serve.

    While the registry is silent the last view stays, and only the workers' own health takes any of them out.
    """

    def __init__(self, group: TaskGroup, probe: ProbeConfig, dial: Dial) -> None:
        self._group = group
        self._dial = dial
        self._probe = probe
        self._members: dict[tuple[str, int, str], _Member] = {}
        self._models: dict[str, ServedModel] = {}
        self._cards: dict[str, tuple[bytes, asyncio.Future[ServedModel]]] = {}
        self._ready: Latest[bool] = Latest()
        self._changed = asyncio.Event()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker that is watched, ready or not."""
        return tuple(member.worker for member in self._members.values() if member.worker)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The models that a registered worker serves, by name."""
        names = sorted({worker.record.model for worker in self.workers} & self._models.keys())
        return tuple(self._models[name] for name in names)

    def model(self, name: str) -> ServedModel:
        """The model of that name, or the only one if it is empty.

        Raises InvalidRequest if it is not clear which, ModelNotFound, or NoWorker if none can be asked about it now.
        """
        served = self.models
        if name in self._models:
            return self._models[name]
        if not name and len(served) == 1:
            return served[0]
        if not name and served:
            raise InvalidRequest.of("model", f"is missing; served are {_names(served)}")
        if not name or any(worker.record.model == name for worker in self.workers):
            raise NoWorker(f"no worker is ready yet: {self._problems()}")
        raise ModelNotFound(f"no worker serves {name!r}; served are {_names(served) or 'none'}")

    def summary(self) -> dict[str, object]:
        """How many workers there are in each role and state, and the models, each with the roles that are ready."""
        counts = Counter(_roles_and_states(self.workers))
        models: dict[str, set[str]] = {worker.record.model: set() for worker in self.workers}
        for worker in self.workers:
            if worker.state == "ready":
                models[worker.record.model].update(worker.record.roles)
        return {
            "roles": {role: {state: counts[role, state] for state in metrics.WORKER_STATES} for role in metrics.ROLES},
            "models": {name: sorted(models[name]) for name in sorted(models)},
        }

    async def readiness(self) -> AsyncGenerator[bool, None]:
        """Whether any model has a ready decode worker: now, and after each change."""
        self._settle()
        async for ready in self._ready.values():
            yield ready

    async def change(self) -> None:
        """Waits for the next change, of the records or of a worker's health."""
        await self._changed.wait()

    async def follow(self, registry: Registry) -> None:
        """Keeps the members equal to what the registry shows, for ever."""
        async for records in registry.watch():
            self._update(records)

    def close(self) -> None:
        """Lets all workers go."""
        for member in self._members.values():
            member.leave.set()

    def _update(self, records: tuple[WorkerRecord, ...]) -> None:
        seen = {_key(record): record for record in records}
        for key, member in self._members.items():
            if key in seen:
                member.record = seen[key]
            else:
                member.leave.set()
        for key, record in seen.items():
            if key not in self._members:
                member = self._members[key] = _Member(record)
                self._group.create_task(self._host(key, member))
        self._settle()

    async def _host(self, key: tuple[str, int, str], member: _Member) -> None:
        async with connect(member.record, self._dial, self._probe, self._load_card, self._settle) as worker:
            member.worker = worker
            await member.leave.wait()
            del self._members[key]
            log.info("worker left", worker_id=member.record.worker_id, problem=worker.problem)
            self._settle()

    def _settle(self) -> None:
        """Draws the consequences of any change, of the records or of a worker's health."""
        for member in self._members.values():
            if member.worker is None:
                continue
            member.worker.record = member.record
        # What the decode workers say of a model counts: every request ends on one.
        for worker in sorted(self.workers, key=lambda worker: "decode" in worker.record.roles):
            if worker.model:
                self._models[worker.record.model] = worker.model
        metrics.observe_workers(_roles_and_states(self.workers))
        self._ready.set(any("decode" in worker.record.roles and not worker.problem for worker in self.workers))
        # All who wait for this change are woken by it, and none by it who waits for the next.
        self._changed.set()
        self._changed = asyncio.Event()

    def _load_card(self, card: worker_pb2.ModelCard) -> "asyncio.Future[ServedModel]":
        """The model of a card; workers with equal cards share one."""
        digest = hashlib.sha256(card.SerializeToString(deterministic=True)).digest()
        known, future = self._cards.get(card.name, (b"", None))
        if future is None or known != digest:
            future = asyncio.ensure_future(_read(card))
            self._cards[card.name] = (digest, future)
        return asyncio.shield(future)

    def _problems(self) -> str:
        found = [f"{worker.record.worker_id}: {worker.problem}" for worker in self.workers]
        return "; ".join(found) or "none is registered"


@asynccontextmanager
async def watch_cluster(registry: Registry, probe: ProbeConfig, dial: Dial) -> AsyncGenerator[Cluster, None]:
    """The cluster that `registry` shows, for as long as the context is open."""
    async with TaskGroup() as group:
        cluster = Cluster(group, probe, dial)
        following = group.create_task(cluster.follow(registry))
        try:
            yield cluster
        finally:
            following.cancel()
            cluster.close()


async def _read(card: worker_pb2.ModelCard) -> ServedModel:
    try:
        return await asyncio.to_thread(ServedModel.from_card, card)
    except ValueError as error:
        raise EngineFailed(f"the card of {card.name} cannot be used: {error}") from error


def _key(record: WorkerRecord) -> tuple[str, int, str]:
    return (record.worker_id, record.epoch, record.address)


def _roles_and_states(workers: Iterable[Worker]) -> Iterator[tuple[str, str]]:
    for worker in workers:
        for role in worker.record.roles:
            yield role, worker.state


def _names(models: tuple[ServedModel, ...]) -> str:
    return ", ".join(model.name for model in models)
