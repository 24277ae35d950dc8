"""Workers that share one GPU, and a router, each a process of its own. A registry in a folder connects them."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baton import AsyncClient
from baton.errors import BatonError
from baton.inference.v1 import cluster_service_pb2
from benchmarks.gpu_transfer import TINY
from benchmarks.parts import ROOT
from runtime.aio import timeout

_START_SECONDS = 180.0
_END_SECONDS = 20.0
VLLM_STEP_TOKENS = 8192
"""The most tokens of a step of vLLM, the default of its API servers on this GPU."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker: its id, its roles, the settings of its engine, and its other ones."""

    name: str
    roles: Sequence[str]
    engine: Mapping[str, Any]
    module: str = "benchmarks.one_gpu.worker"
    settings: Mapping[str, Any] = field(default_factory=dict)


def embedded(folder: Path, **more: object) -> dict[str, Any]:
    """The embedded engine, on the GPU if there is one."""
    settings: dict[str, Any] = {"kind": "pytorch", "model": str(folder), "name": "benchmark"}
    settings |= {"device": "cpu", "threads": 1, "execution": "fused"} if TINY else {"device": "cuda"}
    return settings | more


def vllm_of(folder: Path, **more: object) -> dict[str, Any]:
    """vLLM without handoffs, and with further arguments of its own; its weights are made up."""
    sizes = {"max_model_len": 8192, "max_num_batched_tokens": VLLM_STEP_TOKENS, "kv_cache_memory_bytes": 20 << 30}
    args = {"load_format": "dummy", "dtype": "bfloat16", "gpu_memory_utilization": 0.4, **sizes, **more}
    # Test requests would disturb what is measured.
    settings = {"whole_requests": True, "canary_seconds": None, "kv_events": False}
    return {"kind": "vllm", "model": str(folder), "name": "benchmark", "args": args, **settings}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A router's addresses, for calls and for metrics, and the settings by which it finds its workers."""

    address: str
    metrics: str
    registered: Mapping[str, Any]
    size: int


@asynccontextmanager
async def cluster(workers: Sequence[Worker], settings: Mapping[str, Any] | None = None) -> AsyncIterator[Cluster]:
    """A cluster whose router, with these settings, finds all workers ready."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        registry = {"kind": "file", "folder": folder, "poll_seconds": 0.05}
        registered = {f"registry.{key}": value for key, value in registry.items()} | {"server": "http2"}
        running: list[subprocess.Popen[bytes]] = []
        for worker in workers:
            own = {"worker_id": worker.name, "roles": list(worker.roles), "engine": worker.engine, **worker.settings}
            listens = {"listen": "127.0.0.1:0", "drain_seconds": 30}
            running.append(stack.enter_context(_process(worker.module, {**registered, **own, **listens})))
        async with router(registered, len(workers), running, settings) as found:
            yield found


@asynccontextmanager
async def router(
    registered: Mapping[str, Any],
    size: int,
    workers: "Sequence[subprocess.Popen[bytes]]" = (),
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Cluster]:
    """A router, once it finds so many workers ready."""
    found = Cluster(f"127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}", registered, size)
    listens = {"listen": found.address, "metrics_listen": found.metrics, "drain_seconds": 0}
    patient = {"probe.timeout_seconds": 10, "probe.hung_seconds": 30}
    with _process("router", {**registered, **patient, **listens, **(settings or {})}) as process:
        async with AsyncClient(found.address) as client, timeout(_START_SECONDS):
            while await _num_ready(client) < size:
                if any(each.poll() is not None for each in (process, *workers)):
                    raise RuntimeError("a process has ended while it started")
                await asyncio.sleep(0.2)
        yield found


async def _num_ready(client: AsyncClient) -> int:
    try:
        workers = await client.workers(timeout_seconds=2.0)
    except BatonError:
        return 0
    return sum(worker.state == cluster_service_pb2.WORKER_STATE_READY for worker in workers)


@contextmanager
def _process(module: str, settings: Mapping[str, Any]) -> "Iterator[subprocess.Popen[bytes]]":
    """A process with these settings, whose output goes to standard error."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    config = str(ROOT / f"deploy/config/{'router' if module == 'router' else 'worker'}.yaml")
    command = [sys.executable, "-m", module, config, *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, stderr=sys.stderr)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
