"""A real Envoy with deploy/envoy/picker.yaml: the endpoint picker names the router of each request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
import yaml
from support.clients.generation import generate, greedy_text
from support.cluster.behind_picker import HOSTS, PickedHosts, open_hosts
from support.eventually import PATIENCE_SECONDS
from support.lifetimes import in_one_task
from support.manifests import DEPLOY
from support.servers.envoy import Envoy, envoy_of
from support.servers.etcd import free_port

from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel

in_shared_loop = pytest.mark.asyncio(loop_scope="module")

MODELS = dict(zip(HOSTS, ("first", "second"), strict=True))
# What Envoy says of a response: where it came from.
SERVED_BY = "x-served-by"
AWAY = "127.0.0.1:1"
# As gateways on Kubernetes have it, with every message that there is.
DUPLEX = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}


@dataclass
class GatedHosts:
    """The hosts behind an Envoy."""

    hosts: PickedHosts
    envoy: Envoy
    http: httpx2.AsyncClient

    async def complete(self, model: str, **more: Any) -> httpx2.Response:
        return await self.http.post("/v1/completions", json={"model": model, "prompt": "one two", **more})


def config_of(hosts: PickedHosts, envoy: Envoy, picker: str, filter_changes: dict[str, Any]) -> dict[str, Any]:
    """deploy/envoy/picker.yaml with the test's addresses, and where each response came from."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "envoy" / "picker.yaml").read_text())
    config["admin"]["address"] = _socket(envoy.admin)
    (listener,) = config["static_resources"]["listeners"]
    listener["address"] = _socket(envoy.address)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    # On a busy machine a late answer of the picker is late, and no failure.
    patient = {"message_timeout": f"{PATIENCE_SECONDS:g}s"}
    manager["http_filters"][0]["typed_config"].update({**patient, **filter_changes})
    served_by = {"header": {"key": SERVED_BY, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    manager["route_config"]["response_headers_to_add"] = [served_by]
    members = {"openai": [hosts.openai(host) for host in HOSTS], "grpc": [hosts.grpc(host) for host in HOSTS]}
    for cluster in config["static_resources"]["clusters"]:
        addresses = members.get(cluster["name"], [picker])
        endpoints = [{"endpoint": {"address": _socket(address)}} for address in addresses]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return config


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@asynccontextmanager
async def gate(folder: Path, hosts: PickedHosts, picker: str = "", **filter_changes: Any) -> AsyncIterator[GatedHosts]:
    """An Envoy before these hosts, once the picker is healthy there; or with another address for it."""
    envoy = Envoy(*(f"127.0.0.1:{free_port()}" for _ in range(3)), folder / "envoy.log")
    config = config_of(hosts, envoy, picker or hosts.picker.picker_address, filter_changes)
    url = f"http://{envoy.address}"
    async with (
        envoy_of(config, envoy, {} if picker else {"picker": 1}),
        httpx2.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_SECONDS) as http,
    ):
        yield GatedHosts(hosts, envoy, http)


@asynccontextmanager
async def open_gated(folder: Path, **filter_changes: Any) -> AsyncIterator[GatedHosts]:
    async with (
        open_hosts((MODELS[HOSTS[0]], MODELS[HOSTS[1]])) as hosts,
        gate(folder, hosts, **filter_changes) as gated,
    ):
        yield gated


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def gated(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[GatedHosts]:
    """Each host serves a model of its own, so that only one of them is right. The second mode is that of Kubernetes."""
    changes = {} if request.param == "BUFFERED" else {"processing_mode": DUPLEX}
    async with in_one_task(open_gated(tmp_path_factory.mktemp("envoy"), **changes)) as running:
        yield running


@in_shared_loop
@pytest.mark.parametrize("host", HOSTS)
async def test_a_request_goes_where_the_picker_said(gated: GatedHosts, host: str) -> None:
    for _ in range(5):
        answer = await gated.complete(MODELS[host], max_tokens=4)
        assert answer.status_code == 200, answer.text
        assert answer.headers[SERVED_BY] == gated.hosts.openai(host)


@in_shared_loop
@pytest.mark.parametrize("host", HOSTS)
async def test_an_answer_streams_through(gated: GatedHosts, host: str) -> None:
    body = {"model": MODELS[host], "messages": [{"role": "user", "content": "count"}], "max_tokens": 20, "stream": True}
    async with gated.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers[SERVED_BY] == gated.hosts.openai(host)
        events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(each) for each in events[:-1]]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])


@in_shared_loop
@pytest.mark.parametrize("host", HOSTS)
async def test_a_grpc_request_goes_where_the_picker_said(gated: GatedHosts, host: str) -> None:
    request = greedy_text("one two", 6)
    request.model = MODELS[host]
    async with open_channel(gated.envoy.address) as channel:
        answer = await generate(InferenceServiceStub(channel), request)
    assert answer.started.decode_worker_id == f"worker-{host}"
    assert answer.finished.usage.completion_tokens == 6


@in_shared_loop
async def test_a_large_body_arrives_whole(gated: GatedHosts) -> None:
    # Larger than what Envoy holds, and than the context: the router, which read all of it, says so.
    answer = await gated.complete(MODELS[HOSTS[1]], prompt="x" * 3_000_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "is too long" in answer.json()["error"]["message"]


@in_shared_loop
async def test_what_the_picker_cannot_read_is_refused_by_a_router(gated: GatedHosts) -> None:
    answer = await gated.http.post("/v1/completions", content=b"{not json")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body"
    assert (await gated.complete("no-such-model")).status_code == 404


@in_shared_loop
async def test_a_request_without_a_body_passes(gated: GatedHosts) -> None:
    answer = await gated.http.get("/v1/models")
    assert {model["id"] for model in answer.json()["data"]} == set(MODELS.values())


@in_shared_loop
async def test_a_client_cannot_name_the_endpoint(gated: GatedHosts) -> None:
    wrong = {"x-gateway-destination-endpoint": gated.hosts.openai(HOSTS[0])}
    body = {"model": MODELS[HOSTS[1]], "prompt": "one two"}
    answer = await gated.http.post("/v1/completions", json=body, headers=wrong)
    assert answer.headers[SERVED_BY] == gated.hosts.openai(HOSTS[1])


async def test_a_dead_endpoint_costs_no_request(tmp_path: Path) -> None:
    async with open_hosts(("first", "second")) as hosts, gate(tmp_path, hosts) as gated:
        await hosts.stacks[HOSTS[1]].aclose()
        # Its worker lives, and is the only one of the model: the other router sends to it.
        answers = await asyncio.gather(*(gated.complete("second", max_tokens=4) for _ in range(8)))
    assert {each.status_code for each in answers} == {200}
    assert {each.headers[SERVED_BY] for each in answers} == {hosts.openai(HOSTS[0])}


@pytest.mark.parametrize("fails_open", [True, False])
async def test_without_the_picker_the_gateway_chooses_or_refuses(tmp_path: Path, *, fails_open: bool) -> None:
    async with open_hosts() as hosts, gate(tmp_path, hosts, AWAY, failure_mode_allow=fails_open) as gated:
        answers = [await gated.complete("demo", max_tokens=4) for _ in range(8)]
    assert {each.status_code for each in answers} == ({200} if fails_open else {500})
