"""Runs `deploy/overlays/small` on this machine with `podman play kube`: `python -m tools.containers.kube`.

What `kubectl kustomize` renders goes to podman as it is, but for what it has no counterpart of: kinds other than
Deployments, gRPC probes (the image's `baton health` instead), ports that are not published, variables in
arguments, and names of services. etcd, which is a StatefulSet, and the receiver of traces are containers beside, by the
names of their services.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baton import AsyncClient, BatonError
from baton.inference.v1.cluster_service_pb2 import WORKER_STATE_READY
from tools.containers import stand_ins
from tools.containers.engine import CommandFailed, Engine, NoEngine, find_engine

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "deploy" / "overlays" / "small"
NETWORK, SUBNET = "baton-kube", "10.123.46.0/24"
# Of the pods, in the order of their Deployments.
ADDRESSES = [f"10.123.46.{number}" for number in range(101, 105)]
# Containers beside the pods, by the names of the services that the manifests call.
ETCD, TRACES = "baton-kube-etcd", "baton-kube-traces"
READY_SECONDS = 300.0
REQUEST_SECONDS = 60.0
# The names of the overlay's images, for those built here.
IMAGES = {"registry.example.com/baton:router": "baton:router", "registry.example.com/baton:cpu": "baton:cpu"}


@dataclass(frozen=True)
class Answer:
    """The reply of a deployment's router, and its sender."""

    text: str
    address: str


def main() -> int:
    """Starts it, sends a prompt, and ends it."""
    try:
        engine = find_engine()
        if not engine.is_podman:
            raise NoEngine("docker runs no manifests of Kubernetes: this needs podman")
        with played(engine) as address:
            answer = asyncio.run(ask(address))
            print(f"{answer.address}: {answer.text}")
    except (NoEngine, CommandFailed) as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def deployments() -> list[Any]:
    """The Deployments of the overlay, adapted to podman."""
    command = ["kubectl", "kustomize", str(OVERLAY)]
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if rendered.returncode != 0:
        raise CommandFailed(f"kubectl kustomize: {rendered.stderr}")
    found = [each for each in yaml.safe_load_all(rendered.stdout) if each["kind"] == "Deployment"]
    for deployment, address in zip(found, ADDRESSES, strict=True):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        container["image"] = f"localhost/{IMAGES[container['image']]}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.pop(probe)
        # podman would publish them on this host, where each can be published once.
        container.pop("ports")
        # podman neither fills in the addresses of pods, nor variables in arguments.
        values = {"POD_IP": address, "POD_NAME": f"{deployment['metadata']['name']}-pod-0"}
        container["env"] = [{"name": name, "value": value} for name, value in values.items()]
        container["args"] = [_filled(each, values) for each in container["args"]]
        container["livenessProbe"] = {"exec": {"command": ["baton", "health"]}, "periodSeconds": 5, "timeoutSeconds": 5}
    return found


def _filled(argument: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], argument)


@contextmanager
def played(engine: Engine) -> Iterator[str]:
    """Plays the manifests on a network of their own; gives the router's address. Raises CommandFailed."""
    stand_ins.make(engine, "etcd")
    with tempfile.TemporaryDirectory(prefix="baton-kube-") as folder:
        manifest = Path(folder, "manifest.yaml")
        manifest.write_text(yaml.safe_dump_all(deployments()))
        try:
            engine.run("network", "create", "--subnet", SUBNET, NETWORK)
            _start_services(engine)
            addresses = [word for address in ADDRESSES for word in ("--ip", address)]
            engine.run("play", "kube", "--network", NETWORK, *addresses, str(manifest))
            yield f"{_ip(engine, 'baton-router-pod-0-router')}:7070"
        finally:
            for command in (("play", "kube", "--down", str(manifest)), ("rm", "--force", "--volumes", ETCD, TRACES)):
                subprocess.run(engine.command(*command), capture_output=True, env=engine.environment)
            engine.run("network", "rm", "--force", NETWORK)


async def ask(address: str) -> Answer:
    """Sends a prompt once prefill and decode are ready. Raises CommandFailed if that takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    async with AsyncClient(address) as client:
        while not {"prefill", "decode"} <= await _ready(client):
            if time.monotonic() > deadline:
                raise CommandFailed(f"not ready after {READY_SECONDS:.0f} s")
            await asyncio.sleep(1)
        text = await client.generate("Sort: pear apple mango", timeout_seconds=REQUEST_SECONDS).text()
    return Answer(text.strip(), address)


async def _ready(client: AsyncClient) -> set[str]:
    """The roles that have a worker which is ready; none while the router does not answer."""
    try:
        workers = await client.workers()
    except BatonError:
        return set()
    return {role for each in workers if each.state == WORKER_STATE_READY for role in each.roles}


def _start_services(engine: Engine) -> None:
    urls = ["--listen-client-urls=http://0.0.0.0:2379", "--advertise-client-urls=http://etcd.baton.svc:2379"]
    etcd = ["etcd", "--data-dir=/etcd-data", "--log-level=error", *urls]
    traces = ["baton", "traces", "--otlp", "0.0.0.0:4317", "--listen", "0.0.0.0:16686"]
    for name, alias, image, command in (
        (ETCD, "etcd.baton.svc", stand_ins.IMAGES["etcd"], etcd),
        (TRACES, "jaeger.baton.svc", "baton:router", traces),
    ):
        options = ["--detach", "--name", name, "--network", NETWORK, "--network-alias", alias, "--no-healthcheck"]
        engine.run("run", *options, image, *command)


def _ip(engine: Engine, container: str) -> str:
    """The address of a container's pod on the network."""
    pod = json.loads(engine.run("inspect", container))[0]["Pod"]
    infra = json.loads(engine.run("pod", "inspect", pod))["InfraContainerID"]
    networks = json.loads(engine.run("inspect", infra))[0]["NetworkSettings"]["Networks"]
    address: str = networks[NETWORK]["IPAddress"]
    return address


if __name__ == "__main__":
    sys.exit(main())
