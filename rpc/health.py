"""`grpc.health.v1` for a process: what is serving now, with a Watch that pushes every change.

The servicer of grpcio-health-checking is not used: when one of several watchers of a service leaves, the others hear
nothing any more, and one watcher that does not read blocks every change.
"""

import asyncio
from collections.abc import Iterable
from typing import TypeAlias

from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Context: TypeAlias = "aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"


class Health:
    """The health of a process and its services. "" is the process; it is NOT_SERVING until its owner says otherwise.

    A service that is known but was never set has the health of the process. To be used from one event loop.
    """

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {"": False}
        self._known: set[str] = set()
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, service: str, serving: bool) -> None:
        """Tells Check and every Watch. Without effect after `close`."""
        self._serving[service] = serving
        self._announce()

    def know(self, services: Iterable[str]) -> None:
        """Names services that have the health of the process until they are set themselves."""
        self._known.update(services)
        self._announce()

    @property
    def serving(self) -> bool:
        """Whether the process is."""
        return self._status("") == SERVING

    def close(self) -> None:
        """Makes everything NOT_SERVING for good, tells the watchers, and ends their streams."""
        self._closed = True
        self._announce()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        """The status now. NOT_FOUND for a service that is not known."""
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """The status now and after every change, until `close`; SERVICE_UNKNOWN for one that is not known yet."""
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
