"""Separates the workers that can do something from those that cannot, with a reason for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from baton.inference.v1 import lora_pb2
from discovery.pairing import is_checkable, layout_name, outside, share_transport, transport_names
from discovery.record import Domain, WorkerRecord
from router.routing.policy import W, WorkerView

W_co = TypeVar("W_co", bound=WorkerView, covariant=True)


@dataclass(frozen=True, slots=True)
class Constraints:
    """The requirements for a worker. Empty texts and sets require nothing."""

    role: str
    model: str
    context_tokens: int
    layout_digest: str = ""
    layout: str = ""  # the layout of `layout_digest` as messages name it
    embedding_layout: str = ""
    encoder: str = ""
    is_dedicated: bool = False  # to this role alone
    reads: tuple[str, ...] | None = None  # transports that its KV would be read by; None if unknown
    lora: lora_pb2.LoraAdapter | None = None  # that it has, or can load
    tried: frozenset[str] = frozenset()  # processes that have failed this request; WorkerRecord.process
    needs: tuple[str, ...] = ()  # capabilities, named as the options of requests that need them
    near: WorkerRecord | None = None  # that it would hand over to, and be `within` one zone, rack or host with
    within: Domain | None = None


class VersionedWorkers(Protocol[W_co]):
    """Workers that are known to be unchanged as long as `version` is."""

    @property
    def workers(self) -> Sequence[W_co]: ...

    @property
    def version(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rejected:
    """A worker that is not eligible, and why."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Filtered(Generic[W]):
    """The eligible workers, and the others."""

    eligible: tuple[W, ...]
    others: tuple[tuple[W, str], ...]  # with the reason

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The others, by their names."""
        return tuple(Rejected(worker.record.worker_id, reason) for worker, reason in self.others)

    def reasons(self) -> str:
        """The reason for each rejected worker, as one line."""
        return "; ".join(f"{one.worker_id}: {one.reason}" for one in self.rejected) or "none is registered"


@dataclass(slots=True)
class EligibleWorkers(Generic[W]):
    """Remembers the eligible workers until one of the workers changes, for constraints that most requests share."""

    _version: int = -1
    # With the shortest context among them.
    _found: dict[tuple[str, str, str], tuple[tuple[W, ...], int]] = field(default_factory=dict)

    def find(self, cluster: VersionedWorkers[W], role: str, model: str, context: int, layout: str) -> tuple[W, ...]:
        """The workers of a role with a context of so many tokens and, unless empty, a layout of embeddings."""
        if cluster.version != self._version:
            self._version = cluster.version
            self._found.clear()
        key = role, model, layout
        found = self._found.get(key)
        if found is None:
            constraints = Constraints(role, model, context_tokens=0, embedding_layout=layout)
            eligible = filter_workers(cluster.workers, constraints).eligible
            shortest = min((worker.record.max_context_tokens for worker in eligible), default=0)
            found = self._found[key] = eligible, shortest
        eligible, shortest = found
        if context <= shortest:
            return eligible
        return tuple(worker for worker in eligible if worker.record.max_context_tokens >= context)


def filter_workers(workers: Sequence[W], constraints: Constraints) -> Filtered[W]:
    """Separates the eligible workers from the others."""
    eligible: list[W] = []
    others: list[tuple[W, str]] = []
    for worker in workers:
        if reason := rejection_reason(worker, constraints):
            others.append((worker, reason))
        else:
            eligible.append(worker)
    return Filtered(tuple(eligible), tuple(others))


def rejection_reason(worker: WorkerView, constraints: Constraints) -> str:
    """The reason that a worker is not eligible; empty if it is."""
    record = worker.record
    if record.model != constraints.model:
        return f"serves {record.model}"
    if constraints.role not in record.roles:
        return f"has no {constraints.role} role"
    if record.draining:
        return "is draining"
    if worker.problem:
        return worker.problem
    if constraints.tried and record.process in constraints.tried:
        return "has failed this request"
    if constraints.layout_digest and record.layout_digest != constraints.layout_digest:
        return f"its KV layout, {layout_name(record)}, differs from {constraints.layout}"
    if constraints.reads is not None and not share_transport(record.offers, constraints.reads):
        offered, read = transport_names(record.offers), transport_names(constraints.reads)
        return f"has no transport in common with the decode worker: it offers {offered}, and read are {read}"
    if constraints.within and constraints.near and (far := outside(record, constraints.within, constraints.near)):
        return far
    if constraints.near and not is_checkable(record, constraints.near):
        return f"cannot digest what it holds, and {constraints.near.worker_id} checks handoffs"
    if record.max_context_tokens < constraints.context_tokens:
        return f"its context ends at {record.max_context_tokens} tokens"
    if constraints.lora is not None and not worker.loras.can_use(constraints.lora):
        return f"has no adapter {constraints.lora.name} of content {constraints.lora.digest[:12]}"
    if lacking := [name for name in constraints.needs if name not in record.capabilities]:
        return f"does not say that it takes {', '.join(lacking)}"
    return _media_rejection_reason(worker, constraints)


def _media_rejection_reason(worker: WorkerView, constraints: Constraints) -> str:
    if constraints.embedding_layout and worker.embedding_layout != constraints.embedding_layout:
        found = worker.embedding_layout[:12] or "none"
        return f"its embedding layout, {found}, differs from {constraints.embedding_layout[:12]}"
    if constraints.encoder and worker.encoder != constraints.encoder:
        return f"its encoder, {worker.encoder[:12]}, differs from {constraints.encoder[:12]}"
    if constraints.is_dedicated and worker.record.roles != (constraints.role,):
        others = " and ".join(role for role in worker.record.roles if role != constraints.role)
        return f"has the {constraints.role} role beside {others} only, which the configuration does not allow"
    return ""
