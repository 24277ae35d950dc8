"""The overlay `small`, played by podman: Deployments as `kubectl kustomize` renders them."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from tools.containers import kube
from tools.containers.engine import Engine


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    if not engine.is_podman:
        pytest.skip("docker plays no manifests")
    with kube.played(engine) as found:
        yield found


def test_a_prompt_is_answered_by_what_the_manifests_start(address: str) -> None:
    assert asyncio.run(kube.ask(address)).text == "apple mango pear"


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "encode"])
def test_a_pod_runs_under_the_limits_of_its_manifest(engine: Engine, address: str, role: str) -> None:
    (container,) = json.loads(engine.run("inspect", f"baton-{role}-pod-0-{role}"))
    assert container["Config"]["User"] == "10001"
    assert container["HostConfig"]["ReadonlyRootfs"] is True
    assert container["HostConfig"]["SecurityOpt"] == ["no-new-privileges"]
    assert not container["EffectiveCaps"]
    assert container["HostConfig"]["Memory"] == 2 * 2**30
