"""The registered workers as requests and operators see them, and the models that they serve."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial

import structlog

from baton.errors import (
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    PermissionDenied,
    RouterStarting,
    Unauthenticated,
)
from baton.inference.v1 import generate_pb2, lora_pb2
from discovery.membership import Latest
from discovery.pairing import Unpaired, partly_unpaired, unpaired
from discovery.record import Domain
from discovery.registry import Registry, WorkerRecord
from engine_protocol.multiplex.peer_stream import StreamDialer
from engine_protocol.roles import completing, roles
from router.config import ProbeConfig
from router.telemetry import metrics
from router.text.served_model import ServedModel
from router.workers.handle import LoadCard, WorkerHandle, connect
from router.workers.loras import SEPARATOR, find_lora, has_lora, split_name
from router.workers.members import Members
from rpc.channels import Dial
from runtime.aio import TaskGroup
from runtime.clock import monotonic, perf_counter
from runtime.lasting import lasting

log = structlog.get_logger(__name__)

# In large fleets what follows from a change takes milliseconds: that rests for so many times as long after each time.
_RESTS = 9
# The pairs of more workers are looked for in a thread.
_PAIRED_AT_ONCE = 64


class Cluster:
    """The workers of a namespace and the models they serve.

    While the registry is unavailable its last view stays, and only failed health checks take workers out.
    """

    def __init__(
        self,
        group: TaskGroup,
        probe: ProbeConfig,
        dial: Dial,
        stream_dialer: StreamDialer | None = None,
        handoff_within: Domain | None = None,
    ) -> None:
        def connected(record: WorkerRecord, load_card: LoadCard) -> AbstractAsyncContextManager[WorkerHandle]:
            return connect(record, dial, probe, load_card, self._refresh, stream_dialer)

        self._within = handoff_within
        self._group = group
        self._members = Members(group, connected, self._refresh)
        self._seen_models: dict[str, ServedModel] = {}
        self._models_version = -1  # of these
        self._unpaired: Mapping[str, Unpaired] = {}  # by process
        self._pairing: asyncio.Task[None] | None = None
        self._refreshes_at = -math.inf
        self._refreshing: asyncio.TimerHandle | None = None
        self._ready: Latest[bool] = Latest()
        self._changed = asyncio.Event()
        self._version = 0

    @property
    def version(self) -> int:
        """Another number after each change of the workers, their records or their health; not of their load."""
        return self._version + self._members.connected

    @property
    def workers(self) -> tuple[WorkerHandle, ...]:
        """Every worker that is watched, ready or not."""
        return self._members.workers

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The models that a registered worker serves, by name."""
        names = sorted({worker.record.model for worker in self.workers} & self._models.keys())
        return tuple(self._models[name] for name in names)

    def model(self, name: str, among: Sequence[ServedModel] | None = None) -> ServedModel:
        """The model of that name; that of an adapter for `<model>:<adapter>`. For an empty name, the only one of those
        with text, or `among` others.

        Raises InvalidRequest for an empty name if there are several, ModelNotFound, NoWorker if none is ready yet, or
        RouterStarting while this router does not know all models.
        """
        if name in self._models:
            return self._models[name]
        served = self._of_text if among is None else among
        if not name and len(served) == 1:
            return served[0]
        if not name and served:
            raise InvalidRequest.of("model", f"is missing; expected one of {_names(served)}")
        for base, adapter in split_name(name):
            if base in self._models and has_lora(self.workers, base, adapter):
                return self._models[base]
        self._require_first_view(name)
        if not name or any(worker.record.model == name for worker in self.workers):
            raise NoWorker(f"no worker is ready yet: {self._problems()}")
        raise ModelNotFound(f"no worker serves {name[:80]!r}; served are {_names(self.models) or 'none'}")

    async def next_process(self, lost: WorkerRecord) -> WorkerHandle:
        """Waits until a later process of a worker is ready."""
        while True:
            for worker in self.workers:
                is_next = worker.record.worker_id == lost.worker_id and worker.record.epoch > lost.epoch
                if is_next and worker.state == "ready":
                    return worker
            await self.change()

    def require_registry(self) -> None:
        """Raises RouterStarting until the registry has been read."""
        if not self._members.is_known:
            raise RouterStarting("this router has just started, and has not read the registry yet")

    def _require_first_view(self, name: str) -> None:
        """Raises RouterStarting while the workers of the first view may still tell that they serve this name."""
        self.require_registry()
        models = {model for model, _ in split_name(name)}
        if worker_id := self._members.untold(models):
            raise RouterStarting(f"this router has just started, and worker {worker_id} has not told its models yet")

    def lora(self, request: generate_pb2.GenerateRequest, model: ServedModel) -> lora_pb2.LoraAdapter | None:
        """The adapter that a request for this model names; None if it names none. Raises as `find_lora`."""
        named = "" if request.model in (model.name, "") else request.model.removeprefix(f"{model.name}{SEPARATOR}")
        if named and request.lora_name and named != request.lora_name:
            raise InvalidRequest.of("lora_name", f"is not the adapter that model names, {named[:80]!r}")
        name = request.lora_name or named
        return find_lora(self.workers, model, name) if name else None

    def summary(self) -> dict[str, object]:
        """The number of workers in each role and state, and the ready roles of each model."""
        counts = Counter(_roles_and_states(self.workers))
        models: dict[str, set[str]] = {worker.record.model: set() for worker in self.workers}
        for worker in self.workers:
            if worker.state == "ready":
                models[worker.record.model].update(worker.record.roles)
        return {
            "roles": {role: {state: counts[role, state] for state in metrics.WORKER_STATES} for role in roles()},
            "models": {name: sorted(models[name]) for name in sorted(models)},
        }

    async def readiness(self) -> AsyncGenerator[bool, None]:
        """True while any model has a ready worker that completes requests: its value now, and after each change."""
        self._refresh()
        async for ready in self._ready.values():
            yield ready

    async def change(self) -> None:
        """Waits for the next change of the records or of a worker's health."""
        await self._changed.wait()

    async def follow(self, registry: Registry) -> None:
        """Follows the registry, until cancelled. Raises Unauthenticated or PermissionDenied as its watch does."""
        await lasting("registry", partial(self._follow, registry), (Unauthenticated, PermissionDenied))

    def close(self) -> None:
        """Stops watching all workers."""
        self._members.close()
        if self._refreshing is not None:
            self._refreshing.cancel()

    async def _follow(self, registry: Registry) -> None:
        async with aclosing(registry.watch()) as views:
            async for records in views:
                began = perf_counter()
                self._update(records)
                # Meanwhile the views of a flood of records become one.
                await asyncio.sleep(_RESTS * (perf_counter() - began))

    def _update(self, records: Sequence[WorkerRecord]) -> None:
        self._members.update(records)
        self._find_pairs()
        self._refresh()

    @property
    def _models(self) -> dict[str, ServedModel]:
        """The models of all workers so far. Those of one that is ready are there at once."""
        self._see_models()
        return self._seen_models

    def _see_models(self) -> None:
        if self._models_version == self.version:
            return
        self._models_version = self.version
        # The cards of decode workers win: every generation ends on one. Requests that fit only some go to those.
        for worker in sorted(self.workers, key=_weight):
            if worker.model:
                self._seen_models[worker.record.model] = worker.model

    def _refresh(self) -> None:
        """Updates everything that depends on the records or on a worker's health, a little after a large update."""
        self._version += 1
        seconds = self._refreshes_at - monotonic()
        if seconds <= 0:
            self._refresh_now()
        elif self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().call_later(seconds, self._refresh_now)

    def _refresh_now(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None
        began = perf_counter()
        self._version += 1  # again: who has looked since the change has seen the records as they were
        self._see_models()
        self._record_unpaired()
        metrics.observe_workers(_roles_and_states(self.workers))
        self._ready.set(any(completing() & set(worker.record.roles) and not worker.problem for worker in self.workers))
        # Wakes the present waiters; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
        self._refreshes_at = monotonic() + _RESTS * (perf_counter() - began)

    def _find_pairs(self) -> None:
        """Finds the workers that fit no other for a handoff, after the records have changed."""
        records = self._members.records
        if self._pairing is not None:
            self._pairing.cancel()
            self._pairing = None
        if len(records) <= _PAIRED_AT_ONCE:
            self._unpaired = unpaired(records, self._within)
        else:
            find = partial(self._find_pairs_aside, records)
            self._pairing = self._group.create_task(lasting("pairs", find))

    async def _find_pairs_aside(self, records: Sequence[WorkerRecord]) -> None:
        self._unpaired = await asyncio.to_thread(unpaired, records, self._within)
        self._refresh()

    def _record_unpaired(self) -> None:
        """Warns once of each worker that fits no other for a handoff: its requests would silently run on one worker."""
        for worker in self.workers:
            found = self._unpaired.get(worker.record.process)
            problem = found.problem if found else ""
            if found and problem != worker.unpaired:
                worker_id = worker.record.worker_id
                log.warning("worker cannot hand over", reason=found.reason, worker_id=worker_id, problem=problem)
            worker.unpaired = problem
        metrics.observe_unpaired(role for worker in self.workers if worker.unpaired for role in worker.record.roles)

    async def pairing_problems(self) -> dict[str, list[str]]:
        """The pairs that cannot hand over, in words, by `WorkerRecord.process`."""
        return await asyncio.to_thread(partly_unpaired, self._members.records, self._within)

    @property
    def _of_text(self) -> tuple[ServedModel, ...]:
        return tuple(model for model in self.models if not model.capabilities.images_only)

    def _problems(self) -> str:
        found = [f"{worker.record.worker_id}: {worker.problem}" for worker in self.workers]
        return "; ".join(found) or "none is registered"


@asynccontextmanager
async def watch_cluster(
    registry: Registry,
    probe: ProbeConfig,
    dial: Dial,
    stream_dialer: StreamDialer | None = None,
    handoff_within: Domain | None = None,
) -> AsyncGenerator[Cluster, None]:
    """Watches the cluster of a registry while the context is open.

    With `stream_dialer` the calls to a worker that offers it share a stream. Handoffs stay `handoff_within`.
    """
    async with TaskGroup() as group:
        cluster = Cluster(group, probe, dial, stream_dialer, handoff_within)
        following = group.create_task(cluster.follow(registry))
        try:
            yield cluster
        finally:
            following.cancel()
            cluster.close()


def _weight(worker: WorkerHandle) -> tuple[bool, int]:
    """By which the last worker's card is that of a model."""
    return "decode" in worker.record.roles, worker.model.limits.max_context_tokens if worker.model else 0


def _roles_and_states(workers: Iterable[WorkerHandle]) -> Iterator[tuple[str, str]]:
    for worker in workers:
        for role in worker.record.roles:
            yield role, worker.state


def _names(models: Sequence[ServedModel]) -> str:
    return ", ".join(model.name for model in models)
