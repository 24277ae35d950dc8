"""EndSession, on all workers of a model: any of them may have what the session leaves."""

import asyncio
from typing import Final

import structlog

from baton.calls import unary
from baton.engine.v1 import worker_pb2
from baton.errors import BatonError, InvalidRequest
from baton.inference.v1 import generate_pb2
from router.admission.quotas import Quotas
from router.sessions.contract import LONGEST_KEY, session_digest
from router.telemetry.stats import RequestStats
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle

log = structlog.get_logger(__name__)

_SECONDS: Final = 2.0
_AT_ONCE: Final = 32


class SessionEnds:
    """Ends sessions. A call counts as a request of its tenant."""

    def __init__(self, cluster: Cluster, quotas: Quotas) -> None:
        self._cluster = cluster
        self._quotas = quotas

    async def end(self, request: generate_pb2.EndSessionRequest, tenant: str) -> int:
        """Ends a session of the tenant; returns how many blocks nothing else needs. Raises InvalidRequest,
        ModelNotFound and QuotaExceeded.

        A worker that does not answer keeps them: they are evicted in their turn.
        """
        if not 0 < len(request.session_key) <= LONGEST_KEY:
            raise InvalidRequest.of("session_key", f"must have 1 to {LONGEST_KEY} characters")
        model = self._cluster.model(request.model)
        async with self._quotas.track(tenant, RequestStats(request_id="")):
            ended = worker_pb2.EndSessionRequest(session=session_digest(tenant, request.session_key))
            workers = [one for one in self._cluster.workers if one.record.model == model.name and not one.problem]
            free = asyncio.Semaphore(_AT_ONCE)
            return sum(await asyncio.gather(*(self._end(worker, ended, free) for worker in workers)))

    async def _end(self, worker: WorkerHandle, ended: worker_pb2.EndSessionRequest, free: asyncio.Semaphore) -> int:
        async with free:
            try:
                with worker.keep_open():
                    answer = await unary(worker.control.EndSession(ended, timeout=_SECONDS))
            except BatonError as error:
                log.info("a session was not ended", worker_id=worker.record.worker_id, reason=error.reason)
                return 0
        return answer.released_blocks
