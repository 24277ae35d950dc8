"""Envoy before a router: deploy/envoy/envoy.yaml before Baton's, and a plain proxy before those of HTTP/1.1."""

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers.cores import Cores, running
from cli.local.envoy import ROOT, EnvoyAddresses, envoy_binary, envoy_config
from cli.local.ports import free_port
from runtime.aio import timeout

_START_SECONDS = 60.0
_MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"


@asynccontextmanager
async def envoy(router: str, folder: Path, cores: Cores, log: Path, *, is_grpc: bool) -> AsyncIterator[str]:
    """The address of an Envoy with one thread before the router at `host:port`. Raises ConfigError without Envoy."""
    addresses = EnvoyAddresses(*(f"127.0.0.1:{free_port()}" for _ in range(3)))
    config = await asyncio.to_thread(_of_grpc, addresses, router, folder) if is_grpc else _plain(addresses, router)
    words = ["--disable-hot-restart", "--concurrency", "1", "--log-level", "error"]
    async with running([envoy_binary(), *words, "--config-yaml", yaml.safe_dump(config)], log, cores.others) as process:
        async with timeout(_START_SECONDS):
            while not await asyncio.to_thread(_is_ready, addresses.admin):
                if process.poll() is not None:
                    raise OSError(f"Envoy has ended; see {log}")
                await asyncio.sleep(0.1)
        yield addresses.clients


def _of_grpc(addresses: EnvoyAddresses, router: str, folder: Path) -> dict[str, Any]:
    """The deployed configuration, but without traces: Envoy would have every request traced."""
    descriptors = folder / "descriptors.binpb"
    subprocess.run([sys.executable, str(ROOT / "tools" / "transcoding.py"), str(descriptors)], check=True, timeout=60)
    config: dict[str, Any] = yaml.safe_load(envoy_config(addresses, [router], "127.0.0.1:1", descriptors.absolute()))
    for listener in config["static_resources"]["listeners"]:
        listener["filter_chains"][0]["filters"][0]["typed_config"].pop("tracing", None)
    return config


def _plain(addresses: EnvoyAddresses, router: str) -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "router", "timeout": "0s"}}
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "clients",
        "http_filters": [{"name": "router", "typed_config": {"@type": _ROUTER}}],
        "route_config": {"virtual_hosts": [{"name": "router", "domains": ["*"], "routes": [route]}]},
    }
    listener = {
        "name": "clients",
        "address": _socket(addresses.clients),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    cluster = {
        "name": "router",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "router",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _socket(router)}}]}],
        },
        "circuit_breakers": {"thresholds": [{"max_connections": 4096, "max_requests": 4096}]},
    }
    return {
        "admin": {"address": _socket(addresses.admin)},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _is_ready(admin: str) -> bool:
    """True if Envoy runs, and knows a router whose health checks, if there are any, have succeeded."""
    try:
        with urllib.request.urlopen(f"http://{admin}/clusters", timeout=2) as answer:
            states = [line for line in answer.read().decode().splitlines() if "::health_flags::" in line]
    except OSError:
        return False
    routers = [line for line in states if line.startswith("router")]
    return bool(routers) and all(line.endswith("::healthy") for line in routers)
