"""A real Envoy as a child process, with deploy/envoy/envoy.yaml: only addresses and ports are the test's own."""

import asyncio
import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.ending_with_parent import ending_with_parent
from support.manifests import ROOT
from support.servers.etcd import free_port

from cli.local.envoy import EnvoyAddresses, envoy_binary, envoy_config
from runtime.aio import timeout

CONFIG = ROOT / "deploy" / "envoy" / "envoy.yaml"
START_SECONDS = 60.0

Change = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Envoy:
    """A running Envoy: where clients connect, its administration, its metrics, and its log."""

    address: str
    admin: str
    metrics: str
    log: Path

    async def healthy_routers(self) -> int:
        """The number of routers that its health checks find healthy."""
        return await self.healthy("routers")

    async def healthy(self, cluster: str) -> int:
        """The number of hosts of a cluster that its health checks find healthy."""
        clusters = await fetch(f"http://{self.admin}/clusters?format=json")
        statuses = yaml.safe_load(clusters)["cluster_statuses"]
        hosts = next(each for each in statuses if each["name"] == cluster).get("host_statuses", [])
        return sum(each["health_status"] == {"eds_health_status": "HEALTHY"} for each in hosts)


def write_descriptors(path: Path) -> None:
    """The configuration that `make envoy` writes."""
    subprocess.run([sys.executable, str(ROOT / "tools" / "transcoding.py"), str(path)], check=True, timeout=60)


@asynccontextmanager
async def running_envoy(
    folder: Path,
    routers: Sequence[str],
    traces: str = "127.0.0.1:1",
    change: Change = lambda config: None,
    options: Sequence[str] = (),
) -> AsyncIterator[Envoy]:
    """An Envoy that has found every one of `routers` healthy. `change` is given the configuration, to change it.

    `options` are more words of its command line.
    """
    addresses = EnvoyAddresses(*(f"127.0.0.1:{free_port()}" for _ in range(3)))
    envoy = Envoy(addresses.clients, addresses.admin, addresses.metrics, folder / "envoy.log")
    await asyncio.to_thread(write_descriptors, folder / "descriptors.binpb")
    config = yaml.safe_load(envoy_config(addresses, routers, traces, folder / "descriptors.binpb"))
    change(config)
    async with envoy_of(config, envoy, {"routers": len(routers)}, options):
        yield envoy


@asynccontextmanager
async def envoy_of(
    config: dict[str, Any], envoy: Envoy, healthy: Mapping[str, int], options: Sequence[str] = ()
) -> AsyncIterator[None]:
    """An Envoy with this configuration, once so many hosts of each of these clusters are healthy."""
    command = [envoy_binary(), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
    with envoy.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *ending_with_parent([*command, *options, "--config-yaml", yaml.safe_dump(config)]), stdout=log, stderr=log
        )
    try:
        async with timeout(START_SECONDS):
            await _until_healthy(envoy, healthy, process)
        yield
    finally:
        process.terminate()
        await process.wait()


async def fetch(request: urllib.request.Request | str) -> bytes:
    """The body of an HTTP response. Raises HTTPError for an error status."""

    def read() -> bytes:
        with urllib.request.urlopen(request, timeout=60) as answer:
            body: bytes = answer.read()
            return body

    return await asyncio.to_thread(read)


async def _until_healthy(envoy: Envoy, healthy: Mapping[str, int], process: asyncio.subprocess.Process) -> None:
    while True:
        assert process.returncode is None, envoy.log.read_text()
        with contextlib.suppress(OSError):
            await fetch(f"http://{envoy.admin}/ready")
            if all([await envoy.healthy(cluster) == count for cluster, count in healthy.items()]):
                return
        await asyncio.sleep(0.05)
