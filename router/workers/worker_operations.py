"""Operations on one worker: its decodes are moved away, it is drained, or its role changes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.calls import stream, unary
from baton.engine.v1 import worker_pb2
from baton.errors import InvalidRequest, RoleMismatch, Unsupported
from baton.inference.v1 import cluster_service_pb2
from discovery.record import MOVES_DECODES
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle

_ANSWER_SECONDS = 10.0  # for callers that set no deadline
_EXCHANGED = frozenset({"prefill", "decode"})


class WorkerOperations:
    """Calls a worker for an operator. All raise InvalidRequest for an id that is not registered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def move(
        self, request: cluster_service_pb2.MoveStreamsRequest, seconds: float | None
    ) -> cluster_service_pb2.MoveStreamsResponse:
        """Asks a worker to give decodes away. Raises Unsupported if its engine cannot."""
        worker = self._find(request.worker_id)
        _require_moves(worker)
        with worker.keep_open():
            shed = worker_pb2.ShedRequest(streams=request.streams)
            answer = await unary(worker.control.Shed(shed, timeout=seconds or _ANSWER_SECONDS))
        return cluster_service_pb2.MoveStreamsResponse(streams=answer.streams)

    async def drain(
        self, request: cluster_service_pb2.DrainWorkerRequest, seconds: float | None
    ) -> AsyncGenerator[cluster_service_pb2.DrainWorkerResponse, None]:
        """Drains a worker, and yields its progress."""
        worker = self._find(request.worker_id)
        asked = worker_pb2.DrainRequest()
        if request.HasField("grace"):
            asked.grace.CopyFrom(request.grace)
        with worker.keep_open():
            async with aclosing(stream(worker.control.Drain(asked, timeout=seconds))) as answers:
                async for answer in answers:
                    yield cluster_service_pb2.DrainWorkerResponse(
                        running=answer.running, handoffs_held=answer.handoffs_held, drained=answer.drained
                    )

    async def change_role(
        self, request: cluster_service_pb2.ChangeRoleRequest, seconds: float | None
    ) -> AsyncGenerator[cluster_service_pb2.ChangeRoleResponse, None]:
        """Changes a worker's role, and yields its progress. Raises RoleMismatch if no other one has the lost role."""
        worker = self._find(request.worker_id)
        _require_moves(worker)
        self._require_others(worker, request.role)
        with worker.keep_open():
            asked = worker_pb2.ChangeRoleRequest(role=request.role)
            async with aclosing(stream(worker.control.ChangeRole(asked, timeout=seconds))) as answers:
                async for answer in answers:
                    yield cluster_service_pb2.ChangeRoleResponse(
                        running=answer.running, handoffs_held=answer.handoffs_held, changed=answer.changed
                    )

    def _find(self, worker_id: str) -> WorkerHandle:
        for worker in self._cluster.workers:
            if worker.record.worker_id == worker_id:
                return worker
        raise InvalidRequest.of("worker_id", f"no worker {worker_id[:80]!r} is registered")

    def _require_others(self, worker: WorkerHandle, role: str) -> None:
        model = worker.record.model
        others = [one for one in self._cluster.workers if one is not worker and one.record.model == model]
        had = {role for one in others if one.state == "ready" for role in one.record.roles}
        if lost := (_EXCHANGED & set(worker.record.roles)) - {role} - had:
            raise RoleMismatch(
                f"worker {worker.record.worker_id} is the only ready one of {model} with the role {', '.join(lost)}"
            )


def _require_moves(worker: WorkerHandle) -> None:
    if MOVES_DECODES not in worker.record.capabilities:
        raise Unsupported(f"the {worker.record.engine} engine of worker {worker.record.worker_id} moves no decodes")
