"""The overlay for gateways with the Gateway API Inference Extension: routers beside workers, a pool and its picker."""

import os
import shutil
import subprocess
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml
from support.manifests import DEPLOY, command_of
from support.schemas import strictly

from router.config import RouterConfig
from services.config import WorkerConfig

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None and "CI" not in os.environ, reason="renders with `kubectl kustomize`"
)

POD_IP = "10.0.0.7"
VARIABLES = {"POD_NAME": "baton-0", "POD_IP": POD_IP}

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
# Of inference.networking.k8s.io/v1, as v1.0 to v1.6 have it. Until v1.5 the picker was required.
INFERENCE_POOL = strictly(
    ["selector", "targetPorts", "endpointPickerRef"],
    selector=strictly(["matchLabels"], matchLabels=LABELS),
    targetPorts={"type": "array", "minItems": 1, "maxItems": 1, "items": strictly(["number"], number=PORT)},
    endpointPickerRef=strictly(
        ["name", "port"],
        group={"const": ""},
        kind={"const": "Service"},
        name=NAME,
        port=strictly(["number"], number=PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)
# The parts of gateway.networking.k8s.io/v1 that are used.
HTTP_ROUTE = strictly(
    ["parentRefs", "rules"],
    parentRefs={"type": "array", "minItems": 1, "items": strictly(["name"], name=NAME, namespace=NAME)},
    rules={
        "type": "array",
        "items": strictly(
            ["backendRefs"],
            matches={"type": "array"},
            backendRefs={"type": "array", "items": strictly(["name"], group=NAME, kind={"type": "string"}, name=NAME)},
            timeouts=strictly([], request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        ),
    },
)


@cache
def rendered() -> list[Any]:
    command = ["kubectl", "kustomize", str(DEPLOY / "overlays" / "inference-gateway")]
    return list(yaml.safe_load_all(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout))


def one(kind: str, name: str) -> Any:
    (found,) = [each for each in rendered() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def test_the_pool_and_its_route_are_valid_strictly() -> None:
    pool, route = one("InferencePool", "baton"), one("HTTPRoute", "baton")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    jsonschema.validate(pool["spec"], INFERENCE_POOL)
    jsonschema.validate(route["spec"], HTTP_ROUTE)


def test_the_pool_has_exactly_the_routers_beside_decode_workers() -> None:
    pool = one("InferencePool", "baton")["spec"]
    members = [
        each
        for each in rendered()
        if each["kind"] in ("Deployment", "StatefulSet")
        and pool["selector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
    ]
    (decode,) = members
    (router,) = decode["spec"]["template"]["spec"]["initContainers"]
    config = router_config(router)
    assert pool["targetPorts"] == [{"number": port_of(router, "openai")}]
    assert config.openai.listen == f"0.0.0.0:{port_of(router, 'openai')}"
    # What the worker in this pod advertises.
    (worker,) = decode["spec"]["template"]["spec"]["containers"]
    assert "advertise=$(POD_IP):7070" in worker["args"]
    assert config.routing.beside == POD_IP


def test_a_router_beside_a_worker_stays_and_drains_after_it() -> None:
    pod = one("Deployment", "baton-decode")["spec"]["template"]["spec"]
    (router,), (worker,) = pod["initContainers"], pod["containers"]
    assert router["restartPolicy"] == "Always"
    worker_config = command_of("worker", worker["args"], VARIABLES).load()
    assert isinstance(worker_config, WorkerConfig)
    drains = worker_config.drain_seconds + worker_config.handoff.lease_seconds + router_config(router).drain_seconds
    assert pod["terminationGracePeriodSeconds"] > drains
    ports = {each["containerPort"] for each in [*router["ports"], *worker["ports"]]}
    assert len(ports) == len(router["ports"]) + len(worker["ports"])


def test_the_pool_s_picker_is_ours_and_names_the_pool_s_port() -> None:
    reference = one("InferencePool", "baton")["spec"]["endpointPickerRef"]
    service = one("Service", reference["name"])["spec"]
    (port,) = service["ports"]
    pod = one("Deployment", "baton-endpoint-picker")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    config = router_config(container)
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert port["port"] == reference["port"]["number"]
    assert config.picker.listen == f"0.0.0.0:{port_of(container, port['targetPort'])}"
    assert [{"number": config.picker.openai_port}] == one("InferencePool", "baton")["spec"]["targetPorts"]


def test_the_route_leads_to_the_pool_and_outlasts_a_request() -> None:
    (rule,) = one("HTTPRoute", "baton")["spec"]["rules"]
    assert rule["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "baton"}]
    (router,) = one("Deployment", "baton-decode")["spec"]["template"]["spec"]["initContainers"]
    seconds = int(rule["timeouts"]["request"].removesuffix("s"))
    assert seconds > router_config(router).limits.request_timeout_seconds


def test_gateways_reach_endpoints_and_the_picker_which_reaches_workers() -> None:
    assert {"port": "openai", "protocol": "TCP"} in one("NetworkPolicy", "baton-endpoints")["spec"]["ingress"][0][
        "ports"
    ]
    (rule,) = one("NetworkPolicy", "baton-endpoint-picker")["spec"]["ingress"]
    assert rule["ports"] == [{"port": "picker", "protocol": "TCP"}]
    workers, _ = one("NetworkPolicy", "baton-workers")["spec"]["ingress"]
    roles = {each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in workers["from"]}
    assert roles == {"router", "picker"}
    assert workers["ports"] == [{"port": "grpc", "protocol": "TCP"}]


def port_of(container: Any, name: str) -> int:
    (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == name]
    return int(port)


def router_config(container: Any) -> RouterConfig:
    words = [*container.get("command", []), *container["args"]]
    config = command_of("router", words, VARIABLES).load()
    assert isinstance(config, RouterConfig)
    return config
