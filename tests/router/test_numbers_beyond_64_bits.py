"""Numbers that 64-bit floating point cannot hold, such as 1e999, are refused by their paths."""

import json
from collections.abc import AsyncIterator

import pytest
from grpc import aio
from support.clients.openai_api import openai_bench, post
from support.cluster.in_process import DECODE, PREFILL, Bench
from support.lifetimes import in_one_task

from baton.error_details import from_rpc_error
from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from baton.kserve import inference_pb2
from router.kserve.tensors import generate_request


@pytest.fixture
async def served() -> AsyncIterator[Bench]:
    async with in_one_task(openai_bench(PREFILL, DECODE)) as running:
        yield running


INPUT = '{"a": [0, 1e999]}'
TURN = '{"role": "user", "content": "x"}'
TOOL_USE = '{"type": "tool_use", "id": "c", "name": "f", "input": ' + INPUT + "}"
TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"minimum": -1e999}}}'
CALL = '{"id": "c", "function": {"name": "f", "arguments": ' + json.dumps(INPUT) + "}}"
LONG = "x" * 100_000

# By a name: the path, the body, and where the number is.
BODIES: dict[str, tuple[str, str, str]] = {
    "input of a call": (
        "/messages",
        f'{{"model": "demo", "max_tokens": 1, "messages": [{{"role": "assistant", "content": [{TOOL_USE}]}}]}}',
        "messages[0].content[0].input.a[1]",
    ),
    "large": (
        "/messages",
        f'{{"model": "demo", "max_tokens": 1, "system": "{LONG}", '
        f'"messages": [{{"role": "assistant", "content": [{TOOL_USE}]}}]}}',
        "messages[0].content[0].input.a[1]",
    ),
    "schema of a tool": (
        "/chat/completions",
        f'{{"messages": [{TURN}], "tools": [{TOOL}]}}',
        "tools[0].function.parameters.minimum",
    ),
    "arguments": (
        "/chat/completions",
        f'{{"messages": [{{"role": "assistant", "tool_calls": [{CALL}]}}]}}',
        "messages[0].tool_calls[0].function.arguments.a[1]",
    ),
    "variables": (
        "/chat/completions",
        f'{{"messages": [{TURN}], "chat_template_kwargs": {{"a": 1e400}}}}',
        "chat_template_kwargs.a",
    ),
    "option": ("/completions", '{"prompt": "x", "temperature": 1e999}', "temperature"),
    "schema": (
        "/responses",
        '{"input": "x", "text": {"format": {"type": "json_schema", "schema": {"maximum": 1e999}}}}',
        "text.format.schema.maximum",
    ),
    "tags in a text": (
        "/completions",
        json.dumps(
            {
                "prompt": "x",
                "structured_outputs": {
                    "structural_tag": '{"structures": [{"begin": "a", "schema": {"minimum": 1e999}, "end": "b"}], '
                    '"triggers": ["a"]}'
                },
            }
        ),
        "structured_outputs.structural_tag.structures[0].schema.minimum",
    ),
}


@pytest.mark.parametrize(("path", "body", "field"), BODIES.values(), ids=BODIES)
async def test_a_body_with_one_is_refused_by_its_path(served: Bench, path: str, body: str, field: str) -> None:
    response = await post(served, path, body.encode())
    message = response.json()["error"]["message"]
    assert (response.status_code, message) == (400, f"{field}: is a number beyond those of 64-bit floating point")


GRPC: dict[str, tuple[generate_pb2.GenerateRequest, str]] = {
    "schema of a tool": (
        generate_pb2.GenerateRequest(
            chat={
                "messages": [{"role": "user", "parts": [{"text": "x"}]}],
                "tools": [{"name": "f", "parameters": '{"minimum": 1e999}'}],
            }
        ),
        "chat.tools[0].parameters.minimum",
    ),
    "arguments": (
        generate_pb2.GenerateRequest(
            chat={"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": INPUT}]}]}
        ),
        "chat.messages[0].tool_calls[0].arguments.a[1]",
    ),
}


@pytest.mark.parametrize(("request_", "field"), GRPC.values(), ids=GRPC)
async def test_a_text_of_json_with_one_is_refused_by_its_path(
    served: Bench, request_: generate_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        async for _ in served.stub.Generate(request_, timeout=30):
            pass
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == field


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ('{"temperature": 1e999}', "inputs.sampling_parameters.temperature"),
        ('{"guided_json": {"minimum": 1e999}}', "inputs.sampling_parameters.guided_json.minimum"),
    ],
)
def test_parameters_of_kserve_with_one_are_refused_by_their_paths(parameters: str, field: str) -> None:
    request = inference_pb2.ModelInferRequest(model_name="demo")
    for name, text in (("text_input", "x"), ("sampling_parameters", parameters)):
        request.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    with pytest.raises(InvalidRequest) as refused:
        generate_request(request, may_stream=False)
    assert refused.value.violations[0].field == field


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
async def test_their_names_are_no_json(served: Bench, constant: str) -> None:
    response = await post(served, "/completions", f'{{"prompt": "x", "temperature": {constant}}}'.encode())
    assert response.status_code == 400
    request = GRPC["arguments"][0]
    request.chat.messages[0].tool_calls[0].arguments = f'{{"a": {constant}}}'
    with pytest.raises(aio.AioRpcError, match="must be the text of a JSON object"):
        async for _ in served.stub.Generate(request, timeout=30):
            pass
