"""Two hosts with a worker and a router each, and a router that picks among them, all in this process."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from support.cluster.behind_envoy import PATIENT
from support.cluster.in_process import simulated
from support.eventually import PATIENCE_SECONDS, eventually
from support.servers.etcd import free_port

from discovery.memory import MemoryRegistry
from router.config import OpenAIConfig, PickerConfig, RouterConfig, RoutingConfig
from router.server import Router, host_router
from services.server import host_worker

# Two hosts, as far as addresses go.
HOSTS = ("127.0.0.1", "127.0.0.2")


@dataclass
class PickedHosts:
    """The router that picks, and the routers beside workers by their host. Leaving a stack ends that router alone."""

    picker: Router
    routers: dict[str, Router]
    stacks: dict[str, AsyncExitStack]
    openai_port: int
    grpc_port: int

    def openai(self, host: str) -> str:
        return f"{host}:{self.openai_port}"

    def grpc(self, host: str) -> str:
        return f"{host}:{self.grpc_port}"


@asynccontextmanager
async def open_hosts(names: tuple[str, str] = ("demo", "demo"), **picker: object) -> AsyncIterator[PickedHosts]:
    """A worker on each host, which serves the model of that name. `picker` is more of the picker's configuration."""
    registry = MemoryRegistry("test")
    openai_port, grpc_port = free_port(), free_port()
    async with AsyncExitStack() as stack:
        for host, name in zip(HOSTS, names, strict=True):
            worker = simulated(f"worker-{host}", "prefill", "decode", decode_step_seconds=0.005)
            engine = worker.engine.model_copy(update={"name": name})
            worker = worker.model_copy(update={"listen": f"{host}:0", "engine": engine})
            await stack.enter_async_context(host_worker(worker, registry))
        config = RouterConfig(listen="127.0.0.1:0", probe=PATIENT, drain_seconds=0)
        more = {"pick_seconds": PATIENCE_SECONDS, **picker}
        section = PickerConfig(listen="127.0.0.1:0", openai_port=openai_port, grpc_port=grpc_port, **more)  # type: ignore[arg-type]
        picking = await stack.enter_async_context(host_router(config.model_copy(update={"picker": section}), registry))
        routers, stacks = {}, {}
        for host in HOSTS:
            stacks[host] = await stack.enter_async_context(AsyncExitStack())
            beside = config.model_copy(
                update={
                    "listen": f"{host}:{grpc_port}",
                    "openai": OpenAIConfig(listen=f"{host}:{openai_port}"),
                    "routing": RoutingConfig(beside=host),
                }
            )
            routers[host] = await stacks[host].enter_async_context(host_router(beside, registry))
        await eventually(lambda: all(_is_ready(router) for router in (picking, *routers.values())))
        yield PickedHosts(picking, routers, stacks, openai_port, grpc_port)


def _is_ready(router: Router) -> bool:
    return sum(not worker.problem for worker in router.cluster.workers) == len(HOSTS)
