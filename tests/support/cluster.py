"""A whole cluster of real processes: workers and a router, found through a given etcd."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc
from support.etcd_server import free_port
from support.processes import Process, process

from rpc.aio import timeout

_PATIENCE_SECONDS = 60.0

# Many tests share two cores: a worker that answers its probe late is busy, not lost.
_PATIENT_ROUTER = ("probe.timeout_seconds=5",)


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to start. `engine` are `key=value` overrides below `engine.`, the same for all workers."""

    namespace: str
    etcd: str
    engine: Mapping[str, object]
    prefill: int = 1
    decode: int = 1
    encode: int = 0
    transports: Sequence[str] = ("shm", "tcp")
    worker: Mapping[str, object] = field(default_factory=dict)
    router: Mapping[str, object] = field(default_factory=dict)
    metrics: bool = False


@dataclass(frozen=True, slots=True)
class Cluster:
    """The processes of a cluster, all serving when it is handed out."""

    router: Process
    prefill: Sequence[Process]
    decode: Sequence[Process]
    encode: Sequence[Process] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)  # by a process's name, if the plan asks for them

    @property
    def workers(self) -> list[Process]:
        return [*self.encode, *self.prefill, *self.decode]


@contextlib.contextmanager
def cluster(plan: ClusterPlan, folder: Path) -> Iterator[Cluster]:
    """Starts all processes at once, waits until each one serves, and ends them all."""
    counts = {"encode": plan.encode, "prefill": plan.prefill, "decode": plan.decode}
    names = ["router-0", *(f"{role}-{index}" for role, count in counts.items() for index in range(count))]
    metrics = {name: f"127.0.0.1:{free_port()}" for name in names if plan.metrics}
    with contextlib.ExitStack() as stack:
        started = {
            role: [_worker(stack, plan, f"{role}-{index}", metrics, folder) for index in range(count)]
            for role, count in counts.items()
        }
        options = [*_common(plan, metrics.get("router-0", "")), *_PATIENT_ROUTER, *_overrides("", plan.router)]
        router = stack.enter_context(process("router", "router.yaml", options, folder / "router.log"))
        whole = Cluster(router, started["prefill"], started["decode"], started["encode"], metrics)
        for each in [*whole.workers, router]:
            each.wait_until_serving()
        yield whole


async def until_ready(channel: grpc.aio.Channel, count: int) -> None:
    """Waits until the router sends work to that many workers."""
    stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
    async with timeout(_PATIENCE_SECONDS):
        while True:
            answer = await stub.ListWorkers(cluster_service_pb2.ListWorkersRequest())
            if [each.state for each in answer.workers].count(cluster_service_pb2.WORKER_STATE_READY) == count:
                return
            await asyncio.sleep(0.05)


def _worker(
    stack: contextlib.ExitStack, plan: ClusterPlan, name: str, metrics: Mapping[str, str], folder: Path
) -> Process:
    role = name.partition("-")[0]
    options = [
        *_common(plan, metrics.get(name, "")),
        f"worker_id={name}",
        f"roles=[{role}]",
        f"transports=[{','.join(plan.transports)}]",
        *_overrides("engine.", plan.engine),
        *_overrides("", plan.worker),
    ]
    return stack.enter_context(process("services", f"{role}.yaml", options, folder / f"{name}.log"))


def _common(plan: ClusterPlan, metrics: str) -> list[str]:
    return [f"namespace={plan.namespace}", f"registry.endpoints=[{plan.etcd}]", f"metrics_listen='{metrics}'"]


def _overrides(prefix: str, values: Mapping[str, object]) -> list[str]:
    return [f"{prefix}{key}={value}" for key, value in values.items()]
