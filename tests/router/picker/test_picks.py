"""The endpoint picker's choice, and its use by the router at that endpoint."""

import gzip
from dataclasses import replace

import pytest
from support.cluster.behind_picker import HOSTS, open_hosts
from support.eventually import PATIENCE_SECONDS
from support.router.worker_views import worker

from baton.errors import BatonError
from baton.inference.v1 import generate_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from router.picker.picks import Endpoints, read_request
from router.workers.handle import WorkerHandle
from rpc.channels import open_channel

GENERATE = "/baton.inference.v1.InferenceService/Generate"


def framed(request: generate_pb2.GenerateRequest) -> bytes:
    message = request.SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message


async def decoded_by(address: str, request: generate_pb2.GenerateRequest) -> str:
    """The worker that answers a request to this router."""
    async with open_channel(address) as channel:
        stream = InferenceServiceStub(channel).Generate(request, timeout=PATIENCE_SECONDS)
        return [message async for message in stream][-1].finished.decode_worker_id


async def test_a_router_beside_a_worker_decodes_there() -> None:
    async with open_hosts() as hosts:
        for number in range(4):
            request = generate_pb2.GenerateRequest(prompt=f"prompt {number}")
            request.stopping.max_tokens = 2
            for host in HOSTS:
                assert await decoded_by(hosts.grpc(host), request) == f"worker-{host}"


async def test_a_host_that_is_a_name_is_looked_up_and_one_that_is_unknown_has_no_endpoint() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        handles = [
            WorkerHandle(replace(worker(name), address=f"{name}:7070"), channel, channel, lambda: None)
            for name in ("localhost", "no-such-host.invalid", "10.0.0.7", "[fd00::7]")
        ]
        found = await Endpoints().beside(handles, 8000)
    addresses = {each.worker.record.worker_id: each.address for each in found}
    assert addresses.pop("localhost") in ("127.0.0.1:8000", "[::1]:8000")
    assert addresses == {"10.0.0.7": "10.0.0.7:8000", "[fd00::7]": "[fd00::7]:8000"}


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("/v1/completions", b'{"model": "m", "prompt": "text"}', "text"),
        ("/v1/completions/?api-version=1", b'{"model": "m", "prompt": "text"}', "text"),
        (GENERATE, framed(generate_pb2.GenerateRequest(prompt="text")), "text"),
    ],
)
async def test_a_body_is_read_as_its_path_says(path: str, body: bytes, prompt: str) -> None:
    request = await read_request(path, [body])
    assert request is not None
    assert request.prompt == prompt


@pytest.mark.parametrize(("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
async def test_a_conversation_is_read_from_its_field(path: str, field: str) -> None:
    pieces = [b'{"model": "m", "', field.encode(), b'": [{"role": "user", "content": "hello"}]}']
    request = await read_request(path, pieces)
    assert request is not None
    assert request.chat.messages[0].parts[0].text == "hello"


async def test_other_paths_generate_nothing() -> None:
    assert await read_request("/v1/embeddings", [b'{"model": "m", "input": "text"}']) is None


@pytest.mark.parametrize(
    "body",
    [b"", b"\0\0", b"\0\0\0\0\xff{}", b"\1\0\0\0\4" + gzip.compress(b"")[:4], b"\0\0\0\0\2\xff\xff"],
)
async def test_what_is_no_grpc_message_is_refused(body: bytes) -> None:
    with pytest.raises(BatonError, match="body"):
        await read_request(GENERATE, [body])
