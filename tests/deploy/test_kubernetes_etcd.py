"""The etcd of deploy/kubernetes/etcd, as far as it can be tried without a cluster."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from support.manifests import DEPLOY, command_of, documents
from support.servers.envoy import fetch
from support.servers.etcd import etcd_binary, free_port

from runtime.aio import timeout

FOLDER = DEPLOY / "kubernetes" / "etcd"
DOCUMENTS = [document for path, document in documents(FOLDER) if path.stem != "kustomization"]


def of_kind(kind: str) -> list[Any]:
    return [document for document in DOCUMENTS if document["kind"] == kind]


def container() -> Any:
    (members,) = of_kind("StatefulSet")
    (only,) = members["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: f"{each['kind']}/{each['metadata']['name']}")
def test_every_manifest_is_valid(document: Any, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_it_is_found_where_every_process_looks_for_it() -> None:
    (service,) = [each for each in of_kind("Service") if each["spec"].get("clusterIP") != "None"]
    place = (
        f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{service['spec']['ports'][0]['port']}"
    )
    deployments = [each for _, each in documents(DEPLOY / "kubernetes") if each["kind"] == "Deployment"]
    assert deployments
    for deployment in deployments:
        (only,) = deployment["spec"]["template"]["spec"]["containers"]
        variables = {"POD_NAME": "x", "POD_IP": "127.0.0.1"}
        command = command_of(deployment["metadata"]["name"], [*only.get("command", []), *only["args"]], variables)
        assert command.load().registry.endpoints == (place,)


def test_its_members_are_those_that_the_set_has() -> None:
    (members,) = of_kind("StatefulSet")
    (listed,) = [each for each in container()["args"] if each.startswith("--initial-cluster=")]
    names = re.findall(r"(etcd-\d)=http://\1\.etcd-peers\.baton\.svc:2380", listed)
    assert names == [f"etcd-{number}" for number in range(members["spec"]["replicas"])]
    assert members["spec"]["serviceName"] == "etcd-peers"


def here(arguments: Sequence[str], folder: str) -> list[str]:
    """The container's options for a cluster of one member on this machine."""
    client, peer, metrics = (free_port() for _ in range(3))
    text = "\n".join(arguments).replace("$(POD_NAME)", "etcd-0").replace("/data/etcd", folder)
    text = re.sub(r"--initial-cluster=.*", f"--initial-cluster=etcd-0=http://127.0.0.1:{peer}", text)
    text = re.sub(r"http://[\w.-]+:2379", f"http://127.0.0.1:{client}", text)
    text = re.sub(r"http://[\w.-]+:2380", f"http://127.0.0.1:{peer}", text)
    return re.sub(r"http://[\w.-]+:2381", f"http://127.0.0.1:{metrics}", text).split("\n")


async def test_etcd_starts_with_these_options(tmp_path: Path) -> None:
    options = here(container()["args"], str(tmp_path / "data"))
    (metrics,) = [option.partition("=")[2] for option in options if option.startswith("--listen-metrics-urls=")]
    process = await asyncio.create_subprocess_exec(etcd_binary(), *options, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with timeout(20):
            while await answer(f"{metrics}/health") != b'{"health":"true","reason":""}':
                assert process.returncode is None
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        await process.wait()


async def answer(url: str) -> bytes:
    with contextlib.suppress(OSError):
        return await fetch(url)
    return b""
