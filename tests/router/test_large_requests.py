"""Requests that would hold the event loop: which are checked in a thread, and which are refused unparsed."""

from dataclasses import replace

import pytest
from google.protobuf.message import Message
from grpc import aio
from support.cluster.in_process import DECODE, PREFILL, bench
from support.router.contexts import request_context

from baton.error_details import from_rpc_error
from baton.errors import InvalidRequest
from baton.inference.v1 import cluster_service_pb2, embed_pb2, generate_pb2, model_pb2, tokenize_pb2
from baton.kserve import inference_pb2
from router.kserve.service import NAME as KSERVE_NAME
from rpc.channels import open_channel


def is_large(request: generate_pb2.GenerateRequest) -> bool:
    return replace(request_context(), request=request, message_bytes=request.ByteSize()).is_large


def with_ids(count: int, **fields: str) -> generate_pb2.GenerateRequest:
    ids = generate_pb2.TokenIds(ids=range(100_000, 100_000 + count))
    return generate_pb2.GenerateRequest(token_ids=ids, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("characters", "expected"), [(4000, False), (8000, True)])
def test_a_long_text_is_large(characters: int, expected: bool) -> None:
    assert is_large(generate_pb2.GenerateRequest(prompt="a" * characters)) == expected


@pytest.mark.parametrize(("count", "expected"), [(4000, False), (4096, False), (4097, True)])
def test_a_long_prompt_of_ids_is_large_later_than_a_text_of_so_many_bytes(count: int, expected: bool) -> None:
    assert is_large(with_ids(count)) == expected


def test_what_comes_beside_the_ids_counts() -> None:
    assert is_large(with_ids(4000, lora_name="a" * 5000))


# What no model can answer is refused before it is parsed.

LONG = "word " * 2**20
KSERVE = inference_pb2.ModelInferRequest(
    model_name="simulated",
    inputs=[{"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [LONG.encode()]}}],
)
INFERENCE, CLUSTER = "baton.inference.v1.InferenceService", "baton.inference.v1.ClusterService"
TOO_LONG: list[tuple[str, Message, str]] = [
    (f"/{INFERENCE}/GenerateUnary", generate_pb2.GenerateUnaryRequest(request={"prompt": LONG}), "request.prompt"),
    (f"/{INFERENCE}/Tokenize", tokenize_pb2.TokenizeRequest(prompt=LONG), "prompt"),
    (f"/{INFERENCE}/Embed", embed_pb2.EmbedRequest(inputs=[{"text": LONG}]), "inputs.text"),
    (f"/{INFERENCE}/GetModel", model_pb2.GetModelRequest(name=LONG), "name"),
    (f"/{CLUSTER}/ExplainRoute", cluster_service_pb2.ExplainRouteRequest(request={"prompt": LONG}), "request.prompt"),
    (f"/{KSERVE_NAME}/ModelInfer", KSERVE, "inputs.contents.bytes_contents"),
]


@pytest.mark.parametrize(("method", "request_", "field"), TOO_LONG, ids=[one[0].rpartition("/")[2] for one in TOO_LONG])
async def test_a_text_that_no_context_holds_is_refused_by_its_field(method: str, request_: Message, field: str) -> None:
    async with bench(PREFILL, DECODE) as running, open_channel(running.address) as channel:
        with pytest.raises(aio.AioRpcError) as refused:
            await channel.unary_unary(method)(request_.SerializeToString(), timeout=30)
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == field
    assert "no request that a model here can answer" in error.violations[0].description
