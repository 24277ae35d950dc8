"""Operations on one worker: its decodes are moved away, it is drained, or its role changes."""

from contextlib import aclosing
from typing import Any

from baton.calls import stream, unary
from baton.engine.v1 import worker_pb2
from baton.errors import Draining, InvalidRequest, RoleMismatch, Unavailable, Unsupported
from baton.inference.v1 import cluster_service_pb2
from discovery.record import MOVES_DECODES, TAKES_OVER
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from runtime.aio import timeout

_ANSWER_SECONDS = 10.0  # for callers that set no deadline
_TAKEOVER_SECONDS = 60.0
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
    ) -> cluster_service_pb2.DrainWorkerResponse:
        """Drains a worker. Returns when nothing is left of its work."""
        worker = self._find(request.worker_id)
        asked = worker_pb2.DrainRequest()
        if request.HasField("grace"):
            asked.grace.CopyFrom(request.grace)
        with worker.keep_open():
            await _to_the_end(worker.control.Drain(asked, timeout=seconds))
        return cluster_service_pb2.DrainWorkerResponse()

    async def change_role(
        self, request: cluster_service_pb2.ChangeRoleRequest, seconds: float | None
    ) -> cluster_service_pb2.ChangeRoleResponse:
        """Changes a worker's role. Returns when nothing of the lost one is left.

        Raises RoleMismatch if no other worker has the lost role.
        """
        worker = self._find(request.worker_id)
        _require_moves(worker)
        self._require_others(worker, request.role)
        with worker.keep_open():
            asked = worker_pb2.ChangeRoleRequest(role=request.role)
            await _to_the_end(worker.control.ChangeRole(asked, timeout=seconds))
        return cluster_service_pb2.ChangeRoleResponse()

    async def upgrade(
        self, request: cluster_service_pb2.UpgradeWorkerRequest, seconds: float | None
    ) -> cluster_service_pb2.UpgradeWorkerResponse:
        """Replaces a worker's process. Returns when the next one is ready.

        Raises Unsupported for a worker that does not keep its KV, Draining for one that drains, RequestExists while
        another upgrade of it runs, LayoutMismatch with the reason if the next process does not fit, and Unavailable if
        it is not ready in time.
        """
        worker = self._find(request.worker_id)
        name = worker.record.worker_id
        if TAKES_OVER not in worker.record.capabilities:
            raise Unsupported(f"worker {name} does not keep its KV (keep_memory.kv), and cannot be upgraded in place")
        lost = Unavailable(f"the next process of worker {name} is not ready yet", worker_id=name)
        try:
            with worker.keep_open():
                await unary(worker.control.Upgrade(worker_pb2.UpgradeRequest(), timeout=seconds))
        except Draining:
            raise
        except Unavailable as error:
            lost = error  # as it ends: its next process has the code of now, whatever it ended by
        try:
            async with timeout(seconds or _TAKEOVER_SECONDS):
                await self._cluster.next_process(worker.record)
        except TimeoutError:
            raise lost from None
        return cluster_service_pb2.UpgradeWorkerResponse()

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


async def _to_the_end(call: Any) -> None:
    """Reads a worker's progress until it ends."""
    async with aclosing(stream(call)) as answers:
        async for _ in answers:
            continue
