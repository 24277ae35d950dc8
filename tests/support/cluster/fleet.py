"""A cluster of real processes that a test may kill, pause, cut off, drain and restart, each behind its own proxy.

`fleet` is for one test; `shared_fleet` for a fixture that the tests of a module share. On a machine of several GPUs the
workers of a fleet take turns with them, and each sees one.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.cluster.forked import ForkedProcess, may_be_forked
from support.cluster.processes import ROOT
from support.cluster.progress import LONGEST_SECONDS, STALLED_SECONDS, Progress
from support.cluster.server_kind import OVERRIDES
from support.engines.device import seeing_gpu
from support.freezing import freeze
from support.lifetimes import in_a_thread
from support.servers.etcd import free_port
from support.servers.tcp_proxy import TcpProxy

from baton.calls import unary
from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from baton.errors import BatonError
from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, inference_service_pb2_grpc
from rpc.channels import open_channel
from runtime.aio import timeout

_PATIENCE_SECONDS = 60.0

# Many tests share two cores: a worker that answers its probe late is busy, not lost.
PATIENT = "probe.timeout_seconds=5"


class Node:
    """A process, and its address, which stays the same over restarts: `proxy` is how its peers reach it.

    `metrics` is where it serves its metrics; empty if it does not.
    """

    def __init__(
        self,
        module: str,
        name: str,
        overrides: Sequence[str],
        metrics: str,
        folder: Path,
        engine_seconds: float = 0.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._environment = environment or {}
        self._stalled_seconds = engine_seconds or STALLED_SECONDS
        self._start_seconds = engine_seconds or LONGEST_SECONDS
        self.metrics = metrics
        self.openai = ""  # of a router that serves OpenAI's API
        self.port = free_port()
        self.proxy = TcpProxy(self.direct)
        self.log = folder / f"{name}.log"
        listening = [f"listen={self.direct}", f"metrics_listen='{metrics}'"]
        self._module = module
        self._overrides = [*overrides, *OVERRIDES, *listening]
        self._popen: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.is_proxied = True

    @property
    def address(self) -> str:
        """`host:port`, through the proxy if it has one."""
        return self.proxy.address if self.is_proxied else self.direct

    @property
    def direct(self) -> str:
        """`host:port` of the process itself."""
        return f"127.0.0.1:{self.port}"

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def is_alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int:
        """The process, which must have been started."""
        assert self._popen is not None
        return self._popen.pid

    def start(self, *more: str) -> None:
        """Starts the process, which does not serve yet."""
        if self.role != "router":
            more = (f"advertise={self.address}", *more)
        if self.openai:
            more = (f"openai.listen={self.openai}", *more)
        arguments, environment = [*self._overrides, *more], {**os.environ, **self._environment}
        if may_be_forked(self._module, arguments, environment):
            self._popen = ForkedProcess(self._module, arguments, environment, self.log)
            return
        command = [sys.executable, "-m", self._module, *arguments]
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)

    def kill(self) -> None:
        """kill -9. One that is dying of an earlier signal may be gone already."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        assert self._popen is not None
        self._popen.wait(10)

    def pause(self) -> None:
        assert self._popen is not None
        freeze(self._popen.pid)

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

    async def serving(self) -> None:
        """Waits until it reports SERVING. Raises AssertionError with its log if it makes no progress."""
        assert self._popen is not None
        progress = Progress(self._popen.pid, self._stalled_seconds, self._start_seconds)
        async with open_channel(self.direct) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while self.is_alive and not progress.has_stalled():
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
    """The processes to start. The texts are `key=value` overrides, for all workers and for all routers.

    With `metrics` each process serves its metrics, at a port of its own. Unless workers are `proxied`, routers call
    them directly: a proxy takes time of the process that has the fleet.
    """

    namespace: str
    etcd: str
    worker: Sequence[str]
    router: Sequence[str] = ()
    _: KW_ONLY
    encode: int = 0
    prefill: int = 2
    decode: int = 2
    diffuse: int = 0
    routers: int = 1
    module: str = "services"  # what workers are started with
    metrics: bool = False
    proxied: bool = True
    openai: bool = False  # whether routers serve OpenAI's API, too
    engine_seconds: float = 0.0  # seconds that a worker may wait for the processes of its engine
    of_one: Mapping[str, Sequence[str]] = field(default_factory=dict)  # overrides of single workers, by name


@dataclass(slots=True)
class Fleet:
    """A running fleet. `stub` and `operators` call the first router, through its proxy."""

    nodes: dict[str, Node]
    stub: inference_service_pb2_grpc.InferenceServiceStub
    operators: cluster_service_pb2_grpc.ClusterServiceStub
    _loads: dict[str, worker_pb2_grpc.WorkerServiceStub] = field(default_factory=dict)

    @property
    def workers(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.role != "router"]

    @property
    def router(self) -> Node:
        """The first router."""
        return self.nodes["router-0"]

    @property
    def metrics(self) -> dict[str, str]:
        """The addresses of the processes' metrics, by name."""
        return {name: node.metrics for name, node in self.nodes.items() if node.metrics}

    async def load(self, name: str) -> cluster_service_pb2.WorkerLoad:
        """The load that a worker itself reports. Raises BatonError."""
        answer = await unary(self._loads[name].GetLoad(worker_pb2.GetLoadRequest(), timeout=10.0))
        load: cluster_service_pb2.WorkerLoad = answer.load
        return load

    async def blocks_used(self) -> int:
        """The blocks in use on all workers. Raises BatonError if one does not answer."""
        loads = await asyncio.gather(*(self.load(node.name) for node in self.workers))
        return sum(load.blocks_used for load in loads)

    async def ready(self, seconds: float = _PATIENCE_SECONDS) -> None:
        """Waits until the router sends work to every worker."""
        async with timeout(seconds):
            while not await self._all_ready():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _all_ready(self) -> bool:
        try:
            answer = await unary(self.operators.ListWorkers(cluster_service_pb2.ListWorkersRequest(), timeout=10.0))
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
        router = await stack.enter_async_context(open_channel(nodes["router-0"].address))
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


@contextmanager
def shared_fleet(plan: FleetPlan, folder: Path) -> Iterator[Fleet]:
    """The same for tests that have an event loop each: the proxies run in a thread, each test opens its own channel."""
    with in_a_thread(fleet(plan, folder)) as running:
        yield running


def overrides(prefix: str, values: Mapping[str, object]) -> list[str]:
    """`key=value` overrides below `prefix`."""
    return [f"{prefix}.{key}={value}" for key, value in values.items()]


# Placed by load alone, so that prefill and decode are apart whatever the workers' caches hold.
_APART = ("routing.policy=least_loaded",)


def _nodes(plan: FleetPlan, folder: Path) -> list[Node]:
    common = [f"namespace={plan.namespace}", f"registry.endpoints=[{plan.etcd}]", "log.format=json"]

    def node(module: str, name: str, *overrides: str) -> Node:
        metrics = f"127.0.0.1:{free_port()}" if plan.metrics else ""
        seen = {} if module == "router" else seeing_gpu(len(nodes))
        return Node(module, name, [overrides[0], *common, *overrides[1:]], metrics, folder, plan.engine_seconds, seen)

    nodes: list[Node] = []
    for role in ("encode", "prefill", "decode", "diffuse"):
        count = getattr(plan, role)
        config = str(ROOT / f"deploy/config/{role}.yaml")
        for index in range(count):
            name = f"{role}-{index}"
            nodes.append(node(plan.module, name, config, f"worker_id={name}", *plan.worker, *plan.of_one.get(name, ())))
            nodes[-1].is_proxied = plan.proxied
    config = str(ROOT / "deploy/config/router.yaml")
    for index in range(plan.routers):
        nodes.append(node("router", f"router-{index}", config, *_APART, *plan.router))
        nodes[-1].openai = f"127.0.0.1:{free_port()}" if plan.openai else ""
    return nodes


async def _says_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = await unary(stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True))
    except BatonError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
