"""The manifests of `deploy/kubernetes` and its overlays: valid in every supported Kubernetes, and by our policy."""

import json
import os
import shutil
import subprocess
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from support.manifests import DEPLOY, command_of
from support.schemas import strictly

from router.config import RouterConfig
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.parallel.followers import check_roles

OVERLAYS = ["kubernetes", "overlays/small", "overlays/gpu", "overlays/multi-node", "overlays/inference-gateway"]
VERSIONS = ["1.29", "1.30", "1.31", "1.32", "1.33", "1.34"]
# What no schema of Kubernetes' own describes.
FOREIGN = {"HTTPRoute", "InferencePool", "LeaderWorkerSet", "ServiceMonitor"}
VARIABLES = {"POD_NAME": "decode-7d4f", "POD_IP": "10.0.0.7"}
# What the controller of LeaderWorkerSets sets in every container, of the first group of two.
RANK = {"LWS_LEADER_ADDRESS": "baton-group-0.baton-group.baton", "LWS_GROUP_SIZE": "2"}


COUNT = {"type": "integer", "minimum": 0}
SHARE = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
# The parts of leaderworkerset.x-k8s.io/v1 that are used here; pods are checked as those of StatefulSets.
LEADER_WORKER_SET = strictly(
    ["leaderWorkerTemplate"],
    replicas=COUNT,
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    rolloutStrategy=strictly(
        ["type"],
        type={"enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=strictly([], maxUnavailable=SHARE, maxSurge=SHARE, partition=COUNT),
    ),
    networkConfig=strictly(["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    leaderWorkerTemplate=strictly(
        ["workerTemplate"],
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        leaderTemplate=strictly(["metadata", "spec"], metadata={"type": "object"}, spec={"type": "object"}),
        workerTemplate=strictly(["metadata", "spec"], metadata={"type": "object"}, spec={"type": "object"}),
    ),
)

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None and "CI" not in os.environ, reason="renders with `kubectl kustomize`"
)


@cache
def rendered(name: str) -> list[Any]:
    """Every manifest, as `kubectl apply --kustomize` would send it."""
    command = ["kubectl", "kustomize", str(DEPLOY / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(name: str, *kinds: str) -> list[Any]:
    return [each for each in rendered(name) if each["kind"] in kinds]


def workloads(name: str) -> list[Any]:
    return of_kind(name, "Deployment", "StatefulSet") + ranks_of(name)


def ranks_of(name: str) -> list[Any]:
    """Rank 0 and the other ranks of each LeaderWorkerSet, as the workloads that its controller makes of them."""
    made = []
    for group in of_kind(name, "LeaderWorkerSet"):
        for rank, part in enumerate(("leaderTemplate", "workerTemplate")):
            template = group["spec"]["leaderWorkerTemplate"][part]
            metadata = {**group["metadata"], "name": f"{group['metadata']['name']}-{rank}"}
            spec = {
                "serviceName": "baton-group",
                "template": template,
                "selector": {"matchLabels": template["metadata"]["labels"]},
            }
            made.append({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec})
    return made


def config_of(workload: Any) -> RouterConfig | WorkerConfig:
    """The configuration that the workload's only process has."""
    (container,) = pod(workload)["containers"]
    variables = {**VARIABLES, **RANK, "LWS_WORKER_INDEX": workload["metadata"]["name"].rpartition("-")[2]}
    words = [*container.get("command", []), *container["args"]]
    return command_of(workload["metadata"]["name"], words, variables).load()


def containers(workload: Any) -> list[Any]:
    """Those of its pods, with those that start before them and stay."""
    return [*pod(workload)["containers"], *pod(workload).get("initContainers", [])]


def _is_own(container: Any) -> bool:
    return "deploy/config" in " ".join(container.get("args", []))


def pod(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def labels(workload: Any) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_is_valid_strictly(version: str) -> None:
    # Most manifests are the same in several overlays.
    different = {json.dumps(each): each for name in OVERLAYS for each in rendered(name) if each["kind"] not in FOREIGN}
    for manifest in [*different.values(), *ranks_of("overlays/multi-node")]:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_every_overlay_is_tested() -> None:
    assert {f"overlays/{path.name}" for path in (DEPLOY / "overlays").iterdir()} == set(OVERLAYS[1:])


@pytest.mark.parametrize("name", OVERLAYS)
class TestPolicy:
    def test_nothing_is_root_or_writes_to_its_image(self, name: str) -> None:
        for workload in workloads(name):
            assert pod(workload)["securityContext"]["runAsNonRoot"] is True
            for container in containers(workload):
                own = container["securityContext"]
                assert own["readOnlyRootFilesystem"] is True
                assert own["allowPrivilegeEscalation"] is False
                assert own["capabilities"] == {"drop": ["ALL"]}

    def test_everything_says_what_it_needs_and_has_a_limit_of_memory(self, name: str) -> None:
        for workload in workloads(name):
            for container in containers(workload):
                assert set(container["resources"]["requests"]) >= {"cpu", "memory"}
                assert "memory" in container["resources"]["limits"]

    def test_everything_has_all_three_probes(self, name: str) -> None:
        for workload in workloads(name):
            for container in containers(workload):
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)

    def test_everything_has_one_disruption_budget(self, name: str) -> None:
        budgets = of_kind(name, "PodDisruptionBudget")
        for workload in workloads(name):
            own = labels(workload)
            assert sum(each["spec"]["selector"]["matchLabels"].items() <= own.items() for each in budgets) == 1

    def test_everything_spreads_over_nodes(self, name: str) -> None:
        for workload in workloads(name):
            spread = pod(workload).get("topologySpreadConstraints", [])
            spread += pod(workload).get("affinity", {}).get("podAntiAffinity", {}).values()
            assert spread, workload["metadata"]["name"]

    def test_baton_s_images_keep_their_entry_point(self, name: str) -> None:
        # Which passes signals on from the first moment.
        own = [each for workload in workloads(name) for each in containers(workload) if _is_own(each)]
        assert own
        assert [each["name"] for each in own if "command" in each] == []

    def test_every_process_drains_before_it_is_killed(self, name: str) -> None:
        for workload in workloads(name):
            (container,) = pod(workload)["containers"]
            if not _is_own(container):
                continue
            config = config_of(workload)
            before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            before += getattr(config, "announce_seconds", 0)
            assert pod(workload)["terminationGracePeriodSeconds"] > before + config.drain_seconds

    def test_no_image_is_latest(self, name: str) -> None:
        images = [each["image"] for workload in workloads(name) for each in containers(workload)]
        assert images
        assert [image for image in images if image.rpartition(":")[2] in ("", "latest", image)] == []

    def test_everything_that_is_mounted_is_there(self, name: str) -> None:
        # Envoy's configuration is made from files by a command of its own.
        claims = {each["metadata"]["name"] for each in of_kind(name, "PersistentVolumeClaim")}
        for workload in workloads(name):
            volumes = pod(workload).get("volumes", [])
            wanted = {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}
            assert wanted <= claims


def test_small_needs_no_gpu_and_no_operator() -> None:
    assert "nvidia.com/gpu" not in yaml.safe_dump_all(rendered("overlays/small"))
    assert of_kind("overlays/small", "ServiceMonitor", "HorizontalPodAutoscaler", "PersistentVolumeClaim") == []
    assert {each["spec"]["replicas"] for each in workloads("overlays/small")} == {1}


def test_the_single_etcd_of_small_waits_for_no_other_member() -> None:
    (etcd,) = of_kind("overlays/small", "StatefulSet")
    (members,) = [each for each in pod(etcd)["containers"][0]["args"] if each.startswith("--initial-cluster=")]
    assert members == "--initial-cluster=etcd-0=http://etcd-0.etcd-peers.baton.svc:2380"


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_leader_worker_set_is_valid_strictly(name: str) -> None:
    for group in of_kind(name, "LeaderWorkerSet"):
        assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        jsonschema.validate(group["spec"], LEADER_WORKER_SET)


def test_the_ranks_of_a_group_are_one_worker_of_whole_requests() -> None:
    first, other = map(config_of, ranks_of("overlays/multi-node"))
    assert isinstance(first, WorkerConfig)
    assert isinstance(other, WorkerConfig)
    assert isinstance(first.engine, PyTorchConfig)
    assert (first.engine.is_follower, other.engine.is_follower) == (False, True)
    assert first.engine.tensor_parallel_size == 2
    assert first.engine.multi_node is not None
    assert first.engine.multi_node.leader == "baton-group-0.baton-group.baton:29500"
    check_roles(first.engine, first.roles)
    assert of_kind("overlays/multi-node", "PodDisruptionBudget")
    deployments = [each["metadata"]["name"] for each in of_kind("overlays/multi-node", "Deployment")]
    assert sorted(deployments) == ["baton-encode", "baton-envoy", "baton-router"]


def test_ranks_reach_one_another_at_every_port() -> None:
    (policy,) = [
        each for each in of_kind("overlays/multi-node", "NetworkPolicy") if each["metadata"]["name"] == "baton-workers"
    ]
    rule = policy["spec"]["ingress"][-1]
    (roles,) = [
        each for each in rule["from"][0]["podSelector"]["matchExpressions"] if each["key"].endswith("component")
    ]
    assert "ports" not in rule
    for workload in ranks_of("overlays/multi-node"):
        assert labels(workload)["app.kubernetes.io/component"] in roles["values"]


def test_other_ranks_are_ready_when_their_group_is() -> None:
    _, other = ranks_of("overlays/multi-node")
    (container,) = pod(other)["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "metrics"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/metrics"


def test_several_nodes_may_not_share_a_role() -> None:
    for workload in of_kind("overlays/multi-node", "Deployment"):
        if workload["metadata"]["name"].startswith("baton-") and workload["metadata"]["name"] != "baton-envoy":
            (spread,) = pod(workload)["topologySpreadConstraints"]
            assert spread["whenUnsatisfiable"] == "DoNotSchedule"
