"""Chooses the endpoints for a request that passes a gateway."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from baton.errors import BatonError, NoWorker
from engine_protocol.roles import completing
from router.config import PickerConfig
from router.explain import RoutingRequests
from router.picker.body import read_request
from router.picker.endpoints import Endpoint, Endpoints
from router.picker.messages import Head
from router.placement.placer import Placer
from router.routing.policy import Placement, Progress
from router.telemetry import metrics
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from runtime.aio import timeout

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Pick:
    """Endpoints as IP:port, the best first. Until `close` the request counts as load of the worker beside the best."""

    endpoints: tuple[str, ...]
    placement: Placement[WorkerHandle] | None = None
    _progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.placement is not None:
            self._progress = self.placement.progress
            self.placement.decode.add_load(0)

    def answered(self) -> None:
        """The answer has begun: the policy no longer counts the prompt as waiting."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.close()

    def close(self) -> None:
        """The gateway has done with the request."""
        self.answered()
        placement, self.placement = self.placement, None
        if placement is not None:
            placement.decode.remove_load(0)


class EndpointPicker:
    """Picks by the router's own policy. A request that the policy cannot place goes to the least busy worker.

    Its router then says what is wrong with it, in the terms of its API.
    """

    def __init__(self, cluster: Cluster, placer: Placer, requests: RoutingRequests, config: PickerConfig) -> None:
        self._cluster = cluster
        self._placer = placer
        self._requests = requests
        self._config = config
        self._endpoints = Endpoints()

    async def pick(self, head: Head, body: Sequence[bytes]) -> Pick:
        """The endpoints for a request, whose body is in pieces; none if it was not read. Raises NoWorker."""
        able = await self._able(head)
        if not able:
            metrics.PICKS.labels("none").inc()
            raise NoWorker("no worker is ready beside an endpoint that the gateway allows")
        placement = await self._place(head, body, able) if body else None
        metrics.PICKS.labels("load" if placement is None else "policy").inc()
        busy = sorted(able, key=lambda endpoint: endpoint.worker.requests)
        best = [each for each in able if placement is not None and each.worker is placement.decode]
        addresses = dict.fromkeys(each.address for each in [*best, *busy])
        pick = Pick(tuple(addresses)[: 1 + self._config.alternatives], placement)
        log.debug("endpoint picked", path=head.path, endpoints=pick.endpoints, by_policy=placement is not None)
        return pick

    async def _able(self, head: Head) -> list[Endpoint]:
        """Those beside ready workers, of the ones that the gateway allows."""
        ready = [worker for worker in self._cluster.workers if _completes(worker)]
        port = self._config.grpc_port if head.is_grpc else self._config.openai_port
        found = await self._endpoints.beside(ready, port)
        return [each for each in found if head.subset is None or each.address in head.subset]

    async def _place(
        self, head: Head, body: Sequence[bytes], able: Sequence[Endpoint]
    ) -> Placement[WorkerHandle] | None:
        """The policy's choice among these; None if it cannot choose, or not in time."""
        among = {each.worker.record.process for each in able}
        try:
            async with timeout(self._config.pick_seconds):
                request = await read_request(head.path, body)
                if request is None:
                    return None
                routed = await self._requests.make(request)
                return self._placer.place(routed, among)
        except TimeoutError:
            log.warning("no endpoint by policy in time", path=head.path, seconds=self._config.pick_seconds)
        except BatonError as error:
            log.debug("no endpoint by policy", path=head.path, reason=error.reason, error=error.message)
        return None


def _completes(worker: WorkerHandle) -> bool:
    return worker.state == "ready" and bool(completing() & set(worker.record.roles))
