"""Tools and reasoning on the wire: rendered by the template, and found in what the model writes."""

from collections.abc import Iterator
from typing import Any

import pytest
from grpc import StatusCode, aio
from support.cluster.in_process import Bench, bench
from support.engines.written_engine import HERMES_TEMPLATE, REASONING_TEMPLATE, writes, written_engines

from baton.inference.v1 import generate_pb2, model_pb2, tokenize_pb2

WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": '{"type": "object", "properties": {"days": {"type": "integer", "minimum": 1}}}',
}
USER = {"role": "user", "parts": [{"text": "How is Oslo?"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>'


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    with written_engines():
        yield


@pytest.mark.feature("tools", engine="written", facade="grpc")
async def test_calls_come_apart_from_the_text() -> None:
    async with bench(writes(f"Let me see.\n{CALL}\n{CALL}")) as running:
        stream = await running.generate(chat={"messages": [USER], "tools": [WEATHER]})
    calls = [call for message in stream.messages for call in message.token.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"days": 2}')] * 2
    assert len({call.id for call in calls}) == 2
    assert stream.text == "Let me see.\n"


@pytest.mark.feature("tool arguments as they come", engine="written", facade="grpc")
async def test_arguments_come_as_they_are_written_if_that_is_asked_for() -> None:
    async with bench(writes(f"Let me see.\n{CALL}")) as running:
        asked = {"messages": [USER], "tools": [WEATHER]}
        stream = await running.generate(chat=asked, response={"stream_tool_calls": True})
        kept = await running.generate(chat=asked, response={"stream_tool_calls": True, "keep": {"seconds": 1}})
    pieces = [piece for message in stream.messages for piece in message.token.tool_call_deltas]
    [call] = [call for message in stream.messages for call in message.token.tool_calls]
    assert "".join(piece.arguments for piece in pieces) == call.arguments
    assert (pieces[0].id, pieces[0].name, {piece.index for piece in pieces}) == (call.id, "weather", {0})
    assert stream.text == "Let me see.\n"
    assert not any(message.token.tool_call_deltas for message in kept.messages)


@pytest.mark.feature("reasoning", engine="written", facade="grpc")
async def test_the_unary_response_has_calls_and_reasoning() -> None:
    async with bench(writes(f"hm</think>\n\nYes.{CALL}", REASONING_TEMPLATE)) as running:
        request = generate_pb2.GenerateRequest(chat={"messages": [USER], "tools": [WEATHER]})  # type: ignore[arg-type]
        token = (await running.stub.GenerateUnary(generate_pb2.GenerateUnaryRequest(request=request))).token
    assert (token.reasoning, token.text, [call.name for call in token.tool_calls]) == ("hm", "Yes.", ["weather"])


async def test_without_tools_a_call_is_text() -> None:
    async with bench(writes(CALL)) as running:
        assert await running.text_of(chat={"messages": [USER]}) == CALL


async def test_raw_text_leaves_everything_in_the_text() -> None:
    async with bench(writes(f"hm</think>{CALL}", REASONING_TEMPLATE)) as running:
        chat = {"messages": [USER], "tools": [WEATHER]}
        assert await running.text_of(chat=chat, response={"raw_text": True}) == f"hm</think>{CALL}"


async def test_an_answer_that_is_cut_within_a_call_is_text() -> None:
    async with bench(writes(CALL)) as running:
        stream = await running.generate(chat={"messages": [USER], "tools": [WEATHER]}, stopping={"max_tokens": 20})
        assert stream.text == CALL[:20]


async def test_the_template_gets_tools_calls_and_results() -> None:
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c1", "name": "weather", "arguments": '{"days": 2}'}]},
        {"role": "tool", "parts": [{"text": "rain"}], "tool_call_id": "c1", "name": "weather"},
    ]
    async with bench(writes("")) as running:
        request = tokenize_pb2.TokenizeRequest(chat={"messages": turns, "tools": [WEATHER]})  # type: ignore[arg-type]
        text = (await running.stub.Tokenize(request)).text
    assert '"properties": {"days": {"type": "integer", "minimum": 1}}' in text
    assert '<tool_call>{"name": "weather", "arguments": {"days": 2}}</tool_call>|' in text
    assert "tool: rain (of c1)|" in text


async def test_the_model_says_that_it_takes_tools() -> None:
    async with bench(writes("", REASONING_TEMPLATE)) as running:
        able = (await running.stub.GetModel(model_pb2.GetModelRequest())).model.capabilities
        assert (able.tools, able.reasoning) == (True, True)


async def test_a_template_without_tools_refuses_them(pair: Bench) -> None:
    with pytest.raises(aio.AioRpcError) as failure:
        await pair.generate(chat={"messages": [USER], "tools": [WEATHER]})
    assert failure.value.code() == StatusCode.UNIMPLEMENTED


async def test_an_unknown_format_of_calls_refuses_tools() -> None:
    unknown = HERMES_TEMPLATE.replace("<tool_call>", "<unheard-of>")
    async with bench(writes("", unknown)) as running:
        with pytest.raises(aio.AioRpcError) as failure:
            await running.generate(chat={"messages": [USER], "tools": [WEATHER]})
        assert failure.value.code() == StatusCode.UNIMPLEMENTED


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("chat.tools[0].name", {"messages": [USER], "tools": [{"name": "a b"}]}),
    ("chat.tools[0].parameters", {"messages": [USER], "tools": [{"name": "a", "parameters": "[]"}]}),
    ("chat.tools", {"messages": [USER], "tools": [WEATHER] * 129}),
    (
        "chat.messages[0].tool_calls[0].arguments",
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "{"}]}]},
    ),
]


@pytest.mark.parametrize(("field", "chat"), WRONG, ids=[field for field, _ in WRONG])
async def test_wrong_tools_are_named(field: str, chat: dict[str, Any]) -> None:
    async with bench(writes("")) as running:
        with pytest.raises(aio.AioRpcError) as failure:
            await running.generate(chat=chat)
    assert failure.value.code() == StatusCode.INVALID_ARGUMENT
    assert field in (failure.value.details() or "")
