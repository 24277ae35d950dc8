"""A real Envoy with deploy/envoy/envoy.yaml in front of two routers."""

import asyncio
import base64
import json
import struct
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.protobuf import json_format
from google.rpc import error_details_pb2
from support.clients.generation import generate, generate_all, greedy_text
from support.cluster.behind_envoy import Edge
from support.eventually import eventually
from support.servers.envoy import CONFIG, fetch, write_descriptors

from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, generate_pb2, model_pb2, tokenize_pb2
from cli.local.envoy import EnvoyAddresses, envoy_binary, envoy_config
from router.config import RouterConfig
from rpc.channels import open_channel

in_shared_loop = pytest.mark.asyncio(loop_scope="module")

METHOD = "/baton.inference.v1.InferenceService/"


async def send(edge: Edge, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """One HTTP request; a POST if it has a body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await fetch(urllib.request.Request(f"http://{edge.envoy.address}{path}", body, named))


async def send_json(edge: Edge, path: str, body: Any) -> bytes:
    return await send(edge, path, json.dumps(body).encode(), content_type="application/json")


async def generate_json(edge: Edge, request: generate_pb2.GenerateRequest) -> list[generate_pb2.GenerateResponse]:
    """A stream as lines of JSON."""
    lines = (await send_json(edge, "/v1/generate", json_format.MessageToDict(request))).splitlines()
    return [json_format.Parse(line, generate_pb2.GenerateResponse()) for line in lines]


async def generate_web(edge: Edge, request: generate_pb2.GenerateRequest) -> list[generate_pb2.GenerateResponse]:
    """A stream as gRPC-Web, in the form for browsers' XMLHttpRequest: base64."""
    message = request.SerializeToString()
    body = base64.b64encode(b"\0" + struct.pack(">I", len(message)) + message)
    kind = "application/grpc-web-text"
    answer = await send(edge, f"{METHOD}Generate", body, content_type=kind, accept=kind)
    frames = list(unframed(decoded(answer)))
    assert frames[-1][0] == 0x80
    assert b"grpc-status:0" in frames[-1][1].replace(b" ", b"")
    return [generate_pb2.GenerateResponse.FromString(payload) for flag, payload in frames if flag == 0]


def decoded(text: bytes) -> bytes:
    """Pieces of base64 that are padded each for itself."""
    return b"".join(base64.b64decode(text[at : at + 4]) for at in range(0, len(text), 4))


def unframed(data: bytes) -> list[tuple[int, bytes]]:
    frames = []
    while data:
        flag, length = struct.unpack(">BI", data[:5])
        frames.append((flag, data[5 : 5 + length]))
        data = data[5 + length :]
    return frames


def text_of(messages: list[generate_pb2.GenerateResponse]) -> str:
    return "".join(message.token.text for message in messages)


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    write_descriptors(tmp_path / "descriptors.binpb")
    addresses = EnvoyAddresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    config = envoy_config(addresses, ["127.0.0.1:4", "127.0.0.1:5"], "127.0.0.1:6", tmp_path / "descriptors.binpb")
    command = [envoy_binary(), "--mode", "validate", "--disable-hot-restart", "--config-yaml", config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_no_timeout_of_envoy_is_shorter_than_the_routers() -> None:
    manager = yaml.safe_load(CONFIG.read_text())["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    config = manager["typed_config"]
    (_, route, _) = config["route_config"]["virtual_hosts"][0]["routes"]
    longest = RouterConfig().limits.request_timeout_seconds
    assert float(config["stream_idle_timeout"].removesuffix("s")) > longest
    assert float(route["route"]["idle_timeout"].removesuffix("s")) > longest
    assert route["route"]["timeout"] == "0s"


def test_envoy_pings_routers_less_often_than_they_allow() -> None:
    clusters = {each["name"]: each for each in yaml.safe_load(CONFIG.read_text())["static_resources"]["clusters"]}
    (options,) = clusters["routers"]["typed_extension_protocol_options"].values()
    keepalive = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    assert float(keepalive["interval"].removesuffix("s")) > 5


@in_shared_loop
async def test_grpc_json_and_grpc_web_give_the_same_answer(edge: Edge) -> None:
    request = greedy_text("Sort: pear apple mango", 12)
    native = await generate(edge.stub, request)
    transcoded, web = await generate_json(edge, request), await generate_web(edge, request)
    assert len(native.text) >= 12
    assert text_of(transcoded) == text_of(web) == native.text
    assert [message.sequence for message in transcoded] == list(range(len(transcoded)))
    assert [each[-1].finished.reason for each in (transcoded, web)] == [native.finished.reason] * 2


@in_shared_loop
async def test_unary_json_gives_the_same_answer_too(edge: Edge) -> None:
    request = greedy_text("one two", 6)
    answer = json.loads(await send_json(edge, "/v1/generate:unary", json_format.MessageToDict(request)))
    assert answer["token"]["text"] == (await generate(edge.stub, request)).text
    assert answer["finished"]["reason"] == "FINISH_REASON_LENGTH"


@in_shared_loop
async def test_json_of_the_other_methods_says_what_grpc_says(edge: Edge) -> None:
    tokens = json.loads(await send_json(edge, "/v1/tokenize", {"prompt": "abc"}))["tokenIds"]
    models = json_format.Parse(await send(edge, "/v1/models"), model_pb2.ListModelsResponse())
    model = json_format.Parse(await send(edge, "/v1/models/demo"), model_pb2.GetModelResponse())
    text = json.loads(await send_json(edge, "/v1/detokenize", {"tokenIds": tokens}))["text"]
    assert tokens == list((await edge.stub.Tokenize(tokenize_pb2.TokenizeRequest(prompt="abc"))).token_ids)
    assert models.models == [model.model]
    assert model.model == (await edge.stub.GetModel(model_pb2.GetModelRequest(name="demo"))).model
    assert text == "abc"


@in_shared_loop
async def test_a_cancel_finds_the_router_that_runs_the_request(edge: Edge) -> None:
    request = greedy_text("endless", 4000)
    request.request_id = "to-be-cancelled"
    messages = edge.stub.Generate(request).__aiter__()
    assert (await messages.__anext__()).HasField("started")
    assert (await messages.__anext__()).HasField("token")  # a worker runs it
    assert "receipts" in json.loads(await send_json(edge, "/v1/generations/to-be-cancelled:cancel", {}))
    with pytest.raises(grpc.aio.AioRpcError, match="CANCELLED"):
        [message async for message in messages]


@in_shared_loop
async def test_an_error_is_json_with_its_details(edge: Edge) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        await send_json(edge, "/v1/generate:unary", {"prompt": "x", "sampling": {"temperature": -1}})
    status = json.loads(caught.value.read())
    reasons = [each["reason"] for each in status["details"] if each["@type"].endswith("ErrorInfo")]
    assert (caught.value.code, reasons) == (400, ["INVALID_REQUEST"])


@in_shared_loop
async def test_records_have_a_path_of_json(edge: Edge) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        await send(edge, "/v1/records/no/such-request")
    assert (caught.value.code, "this router keeps no records" in json.loads(caught.value.read())["message"]) == (
        404,
        True,
    )


@in_shared_loop
async def test_an_error_keeps_its_details_for_grpc(edge: Edge) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edge.stub.GetModel(model_pb2.GetModelRequest(name="no-such-model"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    details = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
    assert error_details_pb2.ErrorInfo.DESCRIPTOR.full_name.encode() in details


@in_shared_loop
async def test_a_page_of_another_origin_may_ask(edge: Edge) -> None:
    headers = {"Origin": "http://localhost:5173", "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(f"http://{edge.envoy.address}{METHOD}Generate", None, headers, method="OPTIONS")

    def ask() -> str | None:
        with urllib.request.urlopen(request, timeout=60) as answer:
            allowed: str | None = answer.headers["access-control-allow-origin"]
            return allowed

    assert await asyncio.to_thread(ask) == "http://localhost:5173"


@in_shared_loop
async def test_both_routers_get_requests(edge: Edge) -> None:
    await generate_all(edge.stub, [greedy_text(f"number {i}", 8) for i in range(24)], at_once=12)
    clusters = json.loads(await fetch(f"http://{edge.envoy.admin}/clusters?format=json"))["cluster_statuses"]
    (routers,) = [each["host_statuses"] for each in clusters if each["name"] == "routers"]
    totals = [next(stat["value"] for stat in each["stats"] if stat["name"] == "rq_total") for each in routers]
    assert min(int(total) for total in totals) > 5


@in_shared_loop
async def test_metrics_count_each_method_by_its_name(edge: Edge) -> None:
    await generate(edge.stub, greedy_text("counted", 4))
    metrics = (await fetch(f"http://{edge.envoy.metrics}/metrics")).decode().splitlines()
    counted = [line for line in metrics if line.startswith("envoy_cluster_grpc_0{") and "Generate" in line]
    assert counted, [line for line in metrics if "InferenceService" in line][:8]


@in_shared_loop
async def test_envoy_and_router_are_in_one_trace(edge: Edge) -> None:
    await generate(edge.stub, greedy_text("traced", 4))

    def services_of_traces() -> list[set[str]]:
        return [{record.process.service for record, _ in trace.spans()} for trace in edge.viewer.store.newest_first()]

    await eventually(lambda: {"baton-envoy", "baton-router"} in services_of_traces())


@in_shared_loop
async def test_operators_methods_are_not_there(edge: Edge) -> None:
    async with open_channel(edge.envoy.address) as channel:
        stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await stub.ListWorkers(cluster_service_pb2.ListWorkersRequest())
