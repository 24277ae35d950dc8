"""The endpoint picker's own server, beside the router's."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from baton.envoy import ext_proc_pb2_grpc
from router.config import RouterConfig
from router.picker.picks import EndpointPicker
from router.picker.service import NAME, ExternalProcessorServicer
from router.workers.cluster import Cluster
from rpc.health import Health
from rpc.server import Service, serve
from runtime.aio import TaskGroup
from runtime.lasting import lasting

# The services whose health the protocol of endpoint pickers has, beside its own.
LIVENESS, READINESS = "liveness", "readiness"


@dataclass(frozen=True, slots=True)
class PickerServer:
    """A picker that is listening. `stop` begins its drain, which the end of its context waits for."""

    address: str
    stop: Callable[[], None]


@asynccontextmanager
async def serve_picker(
    config: RouterConfig, picker: EndpointPicker, cluster: Cluster, *, shares_port: bool
) -> AsyncGenerator[PickerServer, None]:
    """Serves the picker until the context is left. With `picker.tls.ca` callers need certificates.

    Raises ConfigError if it cannot listen.
    """
    health, stopping = Health(), asyncio.Event()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    servicer = ExternalProcessorServicer(picker, config.picker, config.limits.max_timeout_seconds)

    async def host() -> None:
        serving = serve(
            config.picker.listen,
            [Service(NAME, ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server, servicer)],
            health=health,
            tls=config.picker.tls,
            announce_seconds=config.announce_seconds,
            drain_seconds=config.drain_seconds,
            kind=config.server,
            shares_port=shares_port,
        )
        async with serving as server:
            started.set_result(server.address)
            await stopping.wait()

    async with TaskGroup() as group:
        reporting = group.create_task(lasting("health", partial(_report_health, cluster, health)))
        group.create_task(host())
        try:
            yield PickerServer(await started, stopping.set)
        finally:
            stopping.set()
            reporting.cancel()


async def _report_health(cluster: Cluster, health: Health) -> None:
    health.set(LIVENESS, True)
    async for ready in cluster.readiness():
        for service in ("", READINESS, NAME):
            health.set(service, ready)
