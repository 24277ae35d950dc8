"""`grpc.health.v1` for a process, with a Watch that pushes every change.

The servicer of grpcio-health-checking is not used: when one of several watchers of a service leaves, the others get no
further updates, and one watcher that does not read blocks every change.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Context: TypeAlias = "aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"


class Health:
    """The health of a process and its services. "" is the process, which is NOT_SERVING until it is set.

    A service that is known but was never set has the health of the process. While `is_well` is false checks are
    answered NOT_SERVING at once: they need not wait for the one who looks at it now and then and calls `set`. Use it
    from one event loop.
    """

    def __init__(self, is_well: Callable[[], bool] | None = None) -> None:
        self._is_well = is_well
        self._serving: dict[str, bool] = {"": False}
        self._known: set[str] = set()
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, service: str, serving: bool) -> None:
        """Sets the health of a service, and notifies every Watch. Has no effect after `close`."""
        self._serving[service] = serving
        self._announce()

    def know(self, services: Iterable[str]) -> None:
        """Adds services, which have the health of the process until they are set."""
        self._known.update(services)
        self._announce()

    @property
    def serving(self) -> bool:
        """True if the process is SERVING."""
        return self._status("") == SERVING

    @property
    def statuses(self) -> Mapping[str, int]:
        """The status of the process, as "", and of each service."""
        return {service: self._status(service) for service in sorted({*self._serving, *self._known})}

    def close(self) -> None:
        """Makes everything NOT_SERVING for good, notifies every Watch, and ends it."""
        self._closed = True
        self._announce()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        """The status now. NOT_FOUND for an unknown service."""
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        if self._is_well is not None and not self._is_well():
            status = NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, _request: Any, _context: Any) -> Any:
        """The status of everything now. Only newer versions of grpcio-health-checking than 1.81 know and serve it."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self.statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """The status now and after every change, until `close`; SERVICE_UNKNOWN for an unknown service."""
        sent: int | None = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            elif self._closed:
                return
            else:
                await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._serving and service not in self._known:
            return SERVICE_UNKNOWN
        serving = self._serving.get(service, self._serving[""]) and not self._closed
        return SERVING if serving else NOT_SERVING

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
