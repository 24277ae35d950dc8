"""`baton up --routers 2 --envoy`: real processes, with the simulated engine."""

import asyncio
import json
import urllib.request
from pathlib import Path

from support.clients.baton_command import Baton
from support.servers.envoy import write_descriptors

from cli.local.envoy import DESCRIPTORS
from cli.local.plan import ClusterOptions, plan
from cli.local.state import StateFolder


def models(address: str) -> list[str]:
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=60) as answer:
        return [model["name"] for model in json.loads(answer.read())["models"]]


async def test_a_cluster_of_two_routers_answers_through_envoy(baton: Baton, tmp_path: Path) -> None:
    if not DESCRIPTORS.is_file():
        write_descriptors(DESCRIPTORS)
    try:
        up = await baton("up", "--engine", "simulated", "--routers", "2", "--envoy")
        assert (up.code, up.err) == (0, "")
        assert "starting etcd and 2 routers behind Envoy" in up.out
        state = StateFolder(tmp_path / ".baton").read()
        assert state is not None
        assert [each.name for each in state.processes][-4:] == ["router", "router-1", "envoy", "traces"]
        (envoy,) = [each.address for each in state.processes if each.role == "envoy"]
        assert envoy in up.out
        assert await asyncio.to_thread(models, envoy) == ["simulated"]
        assert (await baton("health", envoy)).code == 0
        assert (await baton("generate", "hello", "--max-tokens", "2", "--address", envoy)).code == 0
    finally:
        await baton("down")


def test_envoy_is_given_every_router(tmp_path: Path) -> None:
    if not DESCRIPTORS.is_file():
        write_descriptors(DESCRIPTORS)
    cluster = plan(ClusterOptions(engine="simulated", routers=3, envoy=True), tmp_path)
    routers = [each.address for each in cluster.servers if each.role == "router"]
    (envoy,) = [each for each in cluster.servers if each.role == "envoy"]
    assert len(set(routers)) == 3
    assert all(f"port_value: {address.rpartition(':')[2]}" in envoy.command[-1] for address in routers)
