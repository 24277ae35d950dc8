"""Two routers over the same simulated workers, behind a real Envoy."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.cluster.in_process import PLACED_BY_LOAD, simulated
from support.eventually import eventually
from support.servers.envoy import Envoy, running_envoy

from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from devtools.trace_viewer.api import Viewer, open_viewer
from devtools.trace_viewer.store import Bounds
from discovery.memory import MemoryRegistry
from router.config import ProbeConfig, RouterConfig
from router.server import Router, host_router
from rpc.channels import open_channel
from rpc.tracing.exporter import TracingConfig
from services.server import host_worker

# Everything shares this process, and the machine with other tests: a late answer means busy, not lost.
PATIENT = ProbeConfig(interval_seconds=0.2, timeout_seconds=10.0)


@dataclass
class Edge:
    """An Envoy and the cluster behind it. Leaving `first` drains the first router."""

    envoy: Envoy
    stub: InferenceServiceStub
    routers: list[Router]
    first: AsyncExitStack
    viewer: Viewer


@asynccontextmanager
async def open_edge(folder: Path) -> AsyncIterator[Edge]:
    """An Envoy before two routers, a prefill and a decode worker that take 5 ms a token."""
    registry = MemoryRegistry("test")
    async with AsyncExitStack() as stack:
        viewer = await stack.enter_async_context(open_viewer("127.0.0.1:0", "127.0.0.1:0", Bounds()))
        for role in ("prefill", "decode"):
            worker = simulated(f"{role}-0", role, decode_step_seconds=0.005)
            await stack.enter_async_context(host_worker(worker, registry))
        tracing = TracingConfig(endpoint=viewer.otlp_address, export_interval_seconds=0.1)
        config = RouterConfig(
            listen="127.0.0.1:0", probe=PATIENT, drain_seconds=20, tracing=tracing, routing=PLACED_BY_LOAD
        )
        second = await stack.enter_async_context(host_router(config, registry))
        first_stack = await stack.enter_async_context(AsyncExitStack())
        routers = [await first_stack.enter_async_context(host_router(config, registry)), second]
        await eventually(lambda: all(_is_ready(router) for router in routers))
        addresses = [router.address for router in routers]
        envoy = await stack.enter_async_context(running_envoy(folder, addresses, viewer.otlp_address))
        channel = await stack.enter_async_context(open_channel(envoy.address))
        yield Edge(envoy, InferenceServiceStub(channel), routers, first_stack, viewer)


def _is_ready(router: Router) -> bool:
    return sum(not worker.problem for worker in router.cluster.workers) == 2
