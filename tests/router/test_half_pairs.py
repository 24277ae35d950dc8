"""Half of a surrogate pair in the text of JSON within a request is refused by its field: nothing can encode it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc import aio
from support.clients.openai_api import openai_bench, post, tools_worker
from support.cluster.in_process import Bench
from support.lifetimes import in_one_task

from baton.error_details import from_rpc_error
from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2

HALF = r'{"a": "\ud800"}'
NAME = r'{"\udc00": {"not": {}}}'
USER = {"role": "user", "parts": [{"text": "x"}]}
CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": HALF}]}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Bench]:
    async with in_one_task(openai_bench(tools_worker(tmp_path, "prefill", "decode"))) as running:
        yield running


async def test_it_is_refused_by_grpc(served: Bench) -> None:
    wrong: dict[str, dict[str, object]] = {
        "chat.tools[0].parameters": {"chat": {"messages": [USER], "tools": [{"name": "f", "parameters": HALF}]}},
        "chat.messages[1].tool_calls[0].arguments": {"chat": {"messages": [USER, CALL, USER]}},
        "guided.json_schema": {"prompt": "x", "guided": {"json_schema": NAME}},
    }
    for field, request in wrong.items():
        with pytest.raises(aio.AioRpcError) as refused:
            await served.generate(**request)
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidRequest)
        assert [(one.field, one.description) for one in error.violations] == [(field, "has half of a surrogate pair")]


async def test_it_is_refused_within_a_body(served: Bench) -> None:
    turn = {"role": "user", "content": "x"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": HALF}}
    turns = [turn, {"role": "assistant", "content": "", "tool_calls": [call]}, turn]
    response = await post(served, "/chat/completions", {"messages": turns})
    message = "messages[1].tool_calls[0].function.arguments: has half of a surrogate pair"
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": HALF}
    response = await post(served, "/responses", {"input": [turn, item, turn]})
    assert response.status_code == 400


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\xed\xa0\x80"}', '{"prompt": "x"}'.encode("utf-16"), b'{"metadata": {"a": "\xed\xa0\x80"}}']
)
async def test_a_body_in_no_utf_8_is_refused(served: Bench, body: bytes) -> None:
    response = await post(served, "/completions", body)
    message = "body: is not valid UTF-8, or has half of a surrogate pair"
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


async def test_whole_pairs_are_accepted(served: Bench) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": r'{"a": "\ud83d\ude00"}'}]}
    stopping = generate_pb2.GenerateRequest(stopping={"max_tokens": 1}).stopping
    assert (await served.generate(chat={"messages": [USER, call, USER]}, stopping=stopping)).finished


async def test_variables_of_a_template_may_be_nested_only_so_deeply(served: Bench) -> None:
    variables = b'{"a":' * 400 + b"1" + b"}" * 400
    body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": ' + variables + b"}"
    response = await post(served, "/chat/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert "nested too deeply" in error["message"]
