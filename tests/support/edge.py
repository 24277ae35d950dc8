"""Two routers over the same simulated workers, behind a real Envoy."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from support.bench import eventually, simulated
from support.envoy import Envoy, running_envoy

from client.traces.store import Bounds
from client.traces.viewer import Viewer, open_viewer
from discovery.memory import MemoryRegistry
from router.config import ProbeConfig, RouterConfig
from router.host import Router, host_router
from rpc.channels import open_channel
from rpc.tracing.config import TracingConfig
from services.host import host_worker

# All of it shares this process, and this machine with other tests: who answers late is busy, not lost.
PATIENT = ProbeConfig(interval_seconds=0.2, timeout_seconds=10.0)


@dataclass
class Edge:
    """What clients see, and what is behind it. Leaving `first` drains the first router."""

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
        config = RouterConfig(listen="127.0.0.1:0", probe=PATIENT, drain_seconds=20, tracing=tracing)
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
