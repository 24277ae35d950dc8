"""Real processes that a test may kill, pause, cut off, drain and start again, each one behind a proxy of its own."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, inference_service_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.etcd_server import free_port
from support.processes import ROOT
from support.tcp_proxy import TcpProxy

from rpc.aio import timeout
from rpc.calls import unary
from rpc.channels import open_channel
from rpc.errors import BatonError

_PATIENCE_SECONDS = 60.0


class Node:
    """A process, and its address, which stays the same over restarts: `proxy` is how its peers reach it."""

    def __init__(self, module: str, name: str, overrides: Sequence[str], folder: Path) -> None:
        self.name = name
        self.port = free_port()
        self.proxy = TcpProxy(self.direct)
        self.log = folder / f"{name}.log"
        self._command = [sys.executable, "-m", module, *overrides, f"listen={self.direct}"]
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def direct(self) -> str:
        """Past the proxy."""
        return f"127.0.0.1:{self.port}"

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def is_alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self, *more: str) -> None:
        """Starts the process, which does not serve yet."""
        if self.role != "router":
            more = (f"advertise={self.proxy.address}", *more)
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen([*self._command, *more], cwd=ROOT, stdout=output, stderr=output)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        assert self._popen is not None
        self._popen.wait(10)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    async def terminate(self, seconds: float = 40.0) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        assert self._popen is not None
        return await asyncio.to_thread(self._popen.wait, seconds)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, which must be alive."""
        assert self._popen is not None
        os.kill(self._popen.pid, number)

    async def serving(self, seconds: float = _PATIENCE_SECONDS) -> None:
        """Waits until it says SERVING. Raises AssertionError with the end of its log."""
        with suppress(TimeoutError, asyncio.TimeoutError):
            async with timeout(seconds), open_channel(self.direct) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                while self.is_alive:
                    if await _says_serving(stub):
                        return
                    await asyncio.sleep(0.05)
        raise AssertionError(f"{self.name} does not serve; its log ends:\n{self.log.read_text()[-4000:]}")

    def resident_bytes(self) -> int:
        """The memory of the process, which must be alive."""
        assert self._popen is not None
        return psutil.Process(self._popen.pid).memory_info().rss

    def end(self) -> None:
        """Ends it if it still runs."""
        if self.is_alive:
            self.kill()


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to start. The texts are `key=value` overrides, for all workers and for all routers."""

    namespace: str
    etcd: str
    worker: Sequence[str]
    router: Sequence[str] = ()
    encode: int = 0
    prefill: int = 2
    decode: int = 2
    routers: int = 1
    module: str = "services"  # what workers are started with


@dataclass(slots=True)
class Fleet:
    """A running fleet. Stubs and operators speak to the first router, through its proxy."""

    nodes: dict[str, Node]
    stub: inference_service_pb2_grpc.InferenceServiceStub
    operators: cluster_service_pb2_grpc.ClusterServiceStub
    _loads: dict[str, worker_pb2_grpc.WorkerServiceStub] = field(default_factory=dict)

    @property
    def workers(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.role != "router"]

    async def load(self, name: str) -> cluster_service_pb2.WorkerLoad:
        """What a worker says of itself, asked directly. Raises BatonError."""
        answer = await unary(self._loads[name].GetLoad(worker_pb2.GetLoadRequest(), timeout=2.0))
        load: cluster_service_pb2.WorkerLoad = answer.load
        return load

    async def blocks_used(self) -> int:
        """On all workers together. Raises BatonError if one does not answer."""
        loads = await asyncio.gather(*(self.load(node.name) for node in self.workers))
        return sum(load.blocks_used for load in loads)

    async def ready(self, seconds: float = _PATIENCE_SECONDS) -> None:
        """Waits until the router sends work to every worker."""
        async with timeout(seconds):
            while not await self._all_ready():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _all_ready(self) -> bool:
        try:
            answer = await unary(self.operators.ListWorkers(cluster_service_pb2.ListWorkersRequest(), timeout=2.0))
        except BatonError:
            return False
        ready = {one.worker_id for one in answer.workers if one.state == cluster_service_pb2.WORKER_STATE_READY}
        return len(answer.workers) == len(ready) and ready == {node.name for node in self.workers}


@asynccontextmanager
async def fleet(plan: FleetPlan, folder: Path) -> AsyncIterator[Fleet]:
    """Starts all processes, waits until the router sends work to each worker, and ends them all."""
    nodes = {node.name: node for node in _nodes(plan, folder)}
    async with AsyncExitStack() as stack:
        for node in nodes.values():
            await stack.enter_async_context(node.proxy)
            stack.callback(node.end)
            node.start()
        router = await stack.enter_async_context(open_channel(nodes["router-0"].proxy.address))
        loads = {}
        for node in nodes.values():
            if node.role != "router":
                channel = await stack.enter_async_context(open_channel(node.direct))
                loads[node.name] = worker_pb2_grpc.WorkerServiceStub(channel)
        running = Fleet(
            nodes,
            inference_service_pb2_grpc.InferenceServiceStub(router),
            cluster_service_pb2_grpc.ClusterServiceStub(router),
            loads,
        )
        await asyncio.gather(*(node.serving() for node in nodes.values()))
        await running.ready()
        yield running


def _nodes(plan: FleetPlan, folder: Path) -> list[Node]:
    common = [
        f"namespace={plan.namespace}",
        f"registry.endpoints=[{plan.etcd}]",
        "metrics_listen=''",
        "log.format=json",
    ]
    nodes = []
    for role, count in (("encode", plan.encode), ("prefill", plan.prefill), ("decode", plan.decode)):
        config = str(ROOT / f"deploy/config/{role}.yaml")
        for index in range(count):
            name = f"{role}-{index}"
            nodes.append(Node(plan.module, name, [config, *common, f"worker_id={name}", *plan.worker], folder))
    config = str(ROOT / "deploy/config/router.yaml")
    for index in range(plan.routers):
        nodes.append(Node("router", f"router-{index}", [config, *common, *plan.router], folder))
    return nodes


async def _says_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = await unary(stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True))
    except BatonError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
