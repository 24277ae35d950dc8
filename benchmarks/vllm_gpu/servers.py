"""Starts both pairs of engines on the same two GPUs: `vllm serve` behind vLLM's proxy, and Baton's workers and router.

The engines of both pairs have the same arguments. While one pair is measured, the other is idle.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import yaml

from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc
from cli.local.ports import free_port
from rpc.channels import open_channel

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
START_SECONDS = 400.0
END_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of both pairs. `gpus` are those of prefill and decode; `share` is an engine's part of a GPU's
    memory, and `pool_gib` what it has for KV.
    """

    model: Path
    output: Path
    gpus: tuple[str, str]
    share: float
    pool_gib: int
    tiny: bool
    proxy: Path | None

    @property
    def arguments(self) -> dict[str, object]:
        """Of vLLM, by the names of AsyncEngineArgs."""
        sizes = {"max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 8192, "block_size": 64}
        if self.tiny:
            return {**sizes, "load_format": "dummy", "dtype": "float32", "enforce_eager": True, "max_model_len": 512}
        return {**sizes, "load_format": "dummy", "dtype": "bfloat16", **self._memory}

    @property
    def _memory(self) -> dict[str, object]:
        """A pool of a fixed size: engines that start at the same time would take each other's memory for their own."""
        return {"gpu_memory_utilization": self.share, "kv_cache_memory_bytes": self.pool_gib << 30}


@dataclass(frozen=True, slots=True)
class Server:
    """A running process, and where it serves. `metrics` is a URL; empty if it has none."""

    name: str
    process: "subprocess.Popen[bytes]"
    address: str
    metrics: str = ""


async def start_baton(setup: Setup) -> list[Server]:
    """Starts prefill, decode and router, and waits until the router knows both. The last one is the router."""
    workers = [_worker(setup, role, gpu) for role, gpu in zip(("prefill", "decode"), setup.gpus, strict=True)]
    listen, metrics = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    settings = {"listen": listen, "metrics_listen": metrics, **_common(setup)}
    path = setup.output / "router.yaml"
    path.write_text(yaml.safe_dump(settings))
    process = _start(setup, "baton-router", [sys.executable, "-m", "router", str(path)], {})
    servers = [*workers, Server("baton-router", process, listen, f"http://{metrics}/metrics")]
    await _until(servers, lambda: _knows_both(listen))
    return servers


def _worker(setup: Setup, role: str, gpu: str) -> Server:
    listen, metrics = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    engine: dict[str, object] = {"kind": "vllm", "model": str(setup.model), "name": "benchmark"}
    # The other pair is measured while this one is idle, and would be disturbed by its test requests.
    engine |= {"args": setup.arguments, "canary_seconds": None, "cpu_kv_cache_gib": 1}
    if setup.tiny:
        engine["handoff"] = {"ucx_tls": "cma,sm,tcp,self", "ucx_net_devices": "lo"}
    settings = {
        "worker_id": f"{role}-0",
        "roles": [role],
        "listen": listen,
        "metrics_listen": metrics,
        "handoff": {"lease_seconds": 30.0},
        "engine": engine,
        **_common(setup),
    }
    path = setup.output / f"{role}.yaml"
    path.write_text(yaml.safe_dump(settings))
    process = _start(setup, f"baton-{role}", [sys.executable, "-m", "services", str(path)], _sees(setup, gpu))
    return Server(f"baton-{role}", process, listen, f"http://{metrics}/metrics")


def _common(setup: Setup) -> dict[str, object]:
    registry = {"kind": "file", "folder": str(setup.output / "registry")}
    return {"namespace": "benchmark", "registry": registry, "drain_seconds": 1}


async def _knows_both(address: str) -> bool:
    async with open_channel(address) as channel:
        stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
        with suppress(Exception):
            answer = await stub.ListWorkers(cluster_service_pb2.ListWorkersRequest(), timeout=5.0)
            ready = [each for each in answer.workers if each.state == cluster_service_pb2.WORKER_STATE_READY]
            return len(ready) == 2
    return False


async def start_vllm(setup: Setup) -> list[Server]:
    """Starts both servers and the proxy, and waits until they answer. The last one is the proxy."""
    roles = zip(("kv_producer", "kv_consumer"), ("vllm-prefill", "vllm-decode"), setup.gpus, strict=True)
    servers = [_vllm(setup, role, name, gpu) for role, name, gpu in roles]
    await asyncio.gather(*(_until(servers, lambda one=each: _answers(one.address, "/health")) for each in servers))
    if setup.proxy is None:
        return servers
    port = free_port()
    command = [sys.executable, str(setup.proxy), "--host", HOST, "--port", str(port)]
    for side, server in zip(("prefiller", "decoder"), servers, strict=True):
        command += [f"--{side}-hosts", HOST, f"--{side}-ports", server.address.rpartition(":")[2]]
    proxy = Server("vllm-proxy", _start(setup, "vllm-proxy", command, {}), f"{HOST}:{port}")
    await _until([proxy], lambda: _answers(proxy.address, "/healthcheck"))
    return [*servers, proxy]


def _vllm(setup: Setup, role: str, name: str, gpu: str) -> Server:
    port = free_port()
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu" if setup.tiny else "cuda"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(setup.model)]
    command += ["--host", HOST, "--port", str(port), "--served-model-name", "benchmark", "--disable-uvicorn-access-log"]
    for key, value in setup.arguments.items():
        command += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {**_sees(setup, gpu), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    if setup.tiny:
        environment |= {"UCX_TLS": "cma,sm,tcp,self", "UCX_NET_DEVICES": "lo", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    address = f"{HOST}:{port}"
    return Server(name, _start(setup, name, command, environment), address, f"http://{address}/metrics")


def _sees(setup: Setup, gpu: str) -> dict[str, str]:
    return {} if setup.tiny else {"CUDA_VISIBLE_DEVICES": gpu}


def _start(
    setup: Setup, name: str, command: Sequence[str], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    variables = {**os.environ, "PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1", **environment}
    with (setup.output / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True)


async def _answers(address: str, path: str) -> bool:
    def asked() -> bool:
        with suppress(OSError), urlopen(f"http://{address}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    return await asyncio.to_thread(asked)


async def _until(servers: Sequence[Server], is_ready: object) -> None:
    """Raises RuntimeError if a process ends first, or after START_SECONDS."""
    began = time.monotonic()
    while not await is_ready():  # type: ignore[operator]
        for server in servers:
            if server.process.poll() is not None:
                raise RuntimeError(f"{server.name} has ended with {server.process.returncode}")
        if time.monotonic() - began > START_SECONDS:
            raise RuntimeError(f"{', '.join(each.name for each in servers)}: not ready in {START_SECONDS} s")
        await asyncio.sleep(0.5)


def end(servers: Sequence[Server]) -> list[str]:
    """Ends them by SIGTERM. Returns a line for each: its exit code, or that it had to be killed."""
    for server in servers:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
    lines = []
    deadline = time.monotonic() + END_SECONDS
    for server in servers:
        try:
            code = server.process.wait(max(0.1, deadline - time.monotonic()))
            lines.append(f"{server.name}: exit code {code}")
        except subprocess.TimeoutExpired:
            lines.append(f"{server.name}: still runs {END_SECONDS:g} s after SIGTERM, killed")
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
    return lines


@asynccontextmanager
async def ended(servers: list[Server]) -> AsyncIterator[list[Server]]:
    """Ends whatever is in the list at the end."""
    try:
        yield servers
    finally:
        end(servers)
