"""The Kubernetes manifests, as far as they can be tried without a cluster."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.manifests import DEPLOY, Command, command_of, documents

import router.telemetry.metrics  # noqa: F401  (its metrics are looked for)
from runtime.telemetry.metrics import REGISTRY

FOLDER = DEPLOY / "kubernetes"
# What no schema of Kubernetes' own describes.
FOREIGN = {"Kustomization", "ServiceMonitor"}
DOCUMENTS = [(path, document) for path, document in documents(FOLDER) if document["kind"] not in FOREIGN]
DEPLOYMENTS = [document for _, document in DOCUMENTS if document["kind"] == "Deployment"]


def named(each: Any) -> str:
    return f"{each['kind']}/{each['metadata']['name']}" if isinstance(each, dict) else Path(each).name


def of_kind(kind: str) -> list[Any]:
    return [document for _, document in documents(FOLDER) if document["kind"] == kind]


def container(deployment: Any) -> Any:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return only


def command(deployment: Any) -> Command:
    only = container(deployment)
    words = [*only.get("command", []), *only["args"]]
    return command_of(deployment["metadata"]["name"], words, {"POD_NAME": "decode-7d4f", "POD_IP": "10.0.0.7"})


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize(("path", "document"), DOCUMENTS, ids=named)
def test_every_manifest_is_valid(path: Path, document: Any, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_every_file_is_applied() -> None:
    applied = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert sorted(applied) == sorted(path.name for path in FOLDER.glob("*.yaml") if path.stem != "kustomization")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=named)
def test_every_process_has_a_configuration_that_loads(deployment: Any) -> None:
    config = command(deployment).load()
    ports = {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}
    assert config.listen == f"0.0.0.0:{ports['grpc']}"
    assert config.metrics_listen == f"0.0.0.0:{ports['metrics']}"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=named)
def test_a_process_is_killed_only_after_its_drain(deployment: Any) -> None:
    config, only = command(deployment).load(), container(deployment)
    before = only.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    lease = config.handoff.lease_seconds if command(deployment).module == "services" else 0
    before += getattr(config, "announce_seconds", 0)
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > before + config.drain_seconds + lease


def test_a_router_drains_for_as_long_as_a_request_may_take() -> None:
    (deployment,) = [each for each in DEPLOYMENTS if each["metadata"]["name"] == "baton-router"]
    config = command(deployment).load()
    assert config.drain_seconds >= config.limits.request_timeout_seconds


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=named)
def test_probes_are_grpcs_own_and_no_router_is_restarted_for_want_of_workers(deployment: Any) -> None:
    only = container(deployment)
    assert only["readinessProbe"]["grpc"]["port"] == 7070
    assert ("grpc" in only["livenessProbe"]) == (only["name"] != "router")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=named)
def test_no_process_is_root_or_may_become_it(deployment: Any) -> None:
    pod, own = deployment["spec"]["template"]["spec"], container(deployment)["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_every_worker_has_one_gpu() -> None:
    limits = {each["metadata"]["name"]: container(each)["resources"]["limits"] for each in DEPLOYMENTS}
    gpus = {name: limit.get("nvidia.com/gpu") for name, limit in limits.items()}
    assert gpus == {"baton-router": None, "baton-prefill": "1", "baton-decode": "1", "baton-encode": "1"}


def test_every_kind_of_process_has_a_disruption_budget() -> None:
    budgets = {each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] for each in budget_list()}
    assert budgets == {container(each)["name"] for each in DEPLOYMENTS}


def budget_list() -> list[Any]:
    return of_kind("PodDisruptionBudget")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=named)
def test_selectors_find_their_own_pods(deployment: Any) -> None:
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_routers_are_scaled_by_a_metric_that_they_have() -> None:
    (scaler,) = of_kind("HorizontalPodAutoscaler")
    names = [each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"] if each["type"] == "Pods"]
    known = {family.name for family in REGISTRY.collect()}
    assert names
    assert set(names) <= known


def test_metrics_are_scraped_from_the_port_of_the_service_for_them() -> None:
    (monitor,) = of_kind("ServiceMonitor")
    (service,) = [each for each in of_kind("Service") if each["metadata"]["name"] == "baton-metrics"]
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [
        port["name"] for port in service["spec"]["ports"]
    ]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=named)
def test_every_process_is_scraped(deployment: Any) -> None:
    (service,) = [each for each in of_kind("Service") if each["metadata"]["name"] == "baton-metrics"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["metrics"]
    assert "metrics" in [port["name"] for port in container(deployment)["ports"]]


def test_only_baton_itself_reaches_workers() -> None:
    (policy,) = [each for each in of_kind("NetworkPolicy") if each["metadata"]["name"] == "baton-workers"]
    sources = [source for rule in policy["spec"]["ingress"] for source in rule["from"]]
    assert [list(source) for source in sources] == [["podSelector"], ["podSelector"]]
