"""The overlay for gateways with the Gateway API Inference Extension: an InferencePool of routers, and the way to it."""

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

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None and "CI" not in os.environ, reason="renders with `kubectl kustomize`"
)

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


def test_the_pool_has_exactly_the_routers_at_the_port_of_openais_api() -> None:
    pool = one("InferencePool", "baton")["spec"]
    members = [
        each
        for each in rendered()
        if each["kind"] in ("Deployment", "StatefulSet")
        and pool["selector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
    ]
    (router,) = members
    (container,) = router["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    config = router_config(container)
    assert pool["targetPorts"] == [{"number": ports["openai"]}]
    assert config.openai.listen == f"0.0.0.0:{ports['openai']}"


def test_the_route_leads_to_the_pool_and_outlasts_a_request() -> None:
    (rule,) = one("HTTPRoute", "baton")["spec"]["rules"]
    assert rule["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "baton"}]
    (container,) = one("Deployment", "baton-router")["spec"]["template"]["spec"]["containers"]
    seconds = int(rule["timeouts"]["request"].removesuffix("s"))
    assert seconds > router_config(container).limits.request_timeout_seconds


def test_clients_reach_that_port() -> None:
    (rule,) = one("NetworkPolicy", "baton-clients")["spec"]["ingress"]
    assert {"port": "openai", "protocol": "TCP"} in rule["ports"]


def router_config(container: Any) -> RouterConfig:
    words = [*container.get("command", []), *container["args"]]
    config = command_of("baton-router", words, {"POD_NAME": "baton-router-0"}).load()
    assert isinstance(config, RouterConfig)
    return config
