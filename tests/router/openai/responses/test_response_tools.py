"""Tools in /v1/responses, with the official `openai` package: calls whole and streamed, their results, and refusals."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from support.clients.openai_api import client_of, openai_bench, tools_worker
from support.cluster.in_process import Bench
from support.engines.written_engine import REASONING_TEMPLATE, writes, written_engines
from support.lifetimes import in_one_task

from baton.inference.v1 import generate_pb2
from router.openai.fields import read
from router.openai.responses import ResponsesRequest

CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "description": "The weather", "parameters": CITY, "strict": None}
STRICT: Any = {**TOOL, "strict": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
RESULT: Any = {"type": "function_call_output", "call_id": "c1", "output": "rain"}


in_shared_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """The demo model, with a chat template that takes tools."""
    worker = tools_worker(tmp_path_factory.mktemp("template"), "prefill", "decode")
    async with in_one_task(openai_bench(worker)) as running:
        yield running


def chat_of(*items: Any, **fields: Any) -> generate_pb2.ChatInput:
    """The conversation that a request becomes."""
    body = read(ResponsesRequest, {"model": "demo", "input": list(items), **fields})
    return body.generate_request("r1").chat


@pytest.mark.feature("Responses API", engine="written", facade="openai")
async def test_a_call_is_an_item_whose_result_is_sent_back() -> None:
    with written_engines():
        async with openai_bench(writes("On it." + CALL % "Oslo")) as running:
            client = client_of(running)
            turns: Any = [{"role": "user", "content": "Oslo?"}]
            first = await client.responses.create(model="demo", input=turns, tools=[TOOL])
            message, call = first.output
            assert (message.type, first.output_text, first.status) == ("message", "On it.", "completed")
            assert call.type == "function_call"
            assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Oslo"}', "completed")
            assert [tool.name for tool in first.tools if tool.type == "function"] == ["weather"]
            assert (first.tool_choice, first.parallel_tool_calls) == ("auto", True)
            turns += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
            second = await client.responses.create(model="demo", input=turns, tools=[TOOL], tool_choice="none")
            assert [item.type for item in second.output] == ["message"]
            assert second.output_text == "On it." + CALL % "Oslo"
            assert (second.tools, second.tool_choice) == ([], "none")


async def test_streamed_calls_have_the_events_that_the_official_helper_joins() -> None:
    with written_engines():
        async with openai_bench(writes("On it." + CALL % "Oslo" + CALL % "Rome")) as running:
            client = client_of(running)
            async with client.responses.stream(model="demo", input="Oslo?", tools=[TOOL]) as helper:
                events = [event async for event in helper]
                final = await helper.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert [json.loads(item.arguments)["city"] for item in final.output[1:]] == ["Oslo", "Rome"]  # type: ignore[union-attr]
    assert len({item.id for item in final.output}) == 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ends = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.output_index, event.item_id) for event in ends] == [
        (index, final.output[index].id) for index in (1, 2)
    ]
    of_call = [event.type for event in events if getattr(event, "output_index", None) == 1]
    assert of_call == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]


async def test_a_call_after_reasoning_has_no_empty_message_beside_it() -> None:
    with written_engines():
        async with openai_bench(writes("hm</think>\n" + CALL % "Oslo", REASONING_TEMPLATE)) as running:
            client = client_of(running)
            whole = await client.responses.create(model="demo", input="Oslo?", tools=[TOOL])
            async with client.responses.stream(model="demo", input="Oslo?", tools=[TOOL]) as helper:
                streamed = await helper.get_final_response()
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["reasoning", "function_call"]


@pytest.mark.feature("tool choice and strict tools", engine="pytorch", facade="openai")
@in_shared_loop
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
async def test_a_call_that_must_be_made_follows_its_schema(model: Bench, choice: Any) -> None:
    client = client_of(model)
    turns: Any = [{"role": "user", "content": "Oslo?"}]
    async with client.responses.stream(
        model="demo", input=turns, tools=[STRICT], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200
    ) as helper:
        streamed = await helper.get_final_response()
    (call,) = streamed.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    assert streamed.tools[0].strict is True  # type: ignore[union-attr]
    turns += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = await client.responses.create(model="demo", input=turns, tools=[STRICT], max_output_tokens=20)
    assert second.output


def test_calls_and_their_reasoning_join_the_message_before_them() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    message = {"role": "assistant", "content": "On it."}
    calls = [{"type": "function_call", "call_id": f"c{at}", "name": "weather", "arguments": "{}"} for at in range(3)]
    chat = chat_of({"role": "user", "content": "x"}, reasoning, message, *calls[:2], RESULT, reasoning, calls[2])
    assert [
        (turn.role, turn.reasoning, [call.id for call in turn.tool_calls], turn.tool_call_id) for turn in chat.messages
    ] == [
        ("user", "", [], ""),
        ("assistant", "hm", ["c0", "c1"], ""),
        ("tool", "", [], "c1"),
        ("assistant", "hm", ["c2"], ""),
    ]


def test_a_result_may_have_parts() -> None:
    parts = [{"type": "input_text", "text": "rain"}, {"type": "input_image", "image_url": "data:,x"}]
    (turn,) = chat_of({**RESULT, "output": parts}).messages
    assert (turn.parts[0].text, turn.parts[1].media.uri) == ("rain", "data:,x")


@in_shared_loop
async def test_a_reference_to_a_stored_item_says_how_to_send_the_item(model: Bench) -> None:
    reference: Any = {"type": "item_reference", "id": "fc_1"}
    with pytest.raises(openai.BadRequestError, match="store: false") as refused:
        await client_of(model).responses.create(model="demo", input=[reference])
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "input[0].id")


@pytest.mark.parametrize("answer", ["On it." + CALL % "Oslo" + CALL % "Rome" + "Done.", CALL % "Oslo" + CALL % "Rome"])
async def test_one_call_at_most_ends_the_response(answer: str) -> None:
    with written_engines():
        async with openai_bench(writes(answer)) as running:
            client = client_of(running)
            request: Any = {"model": "demo", "input": "Oslo?", "tools": [TOOL], "parallel_tool_calls": False}
            whole = await client.responses.create(**request)
            async with client.responses.stream(**request) as helper:
                streamed = await helper.get_final_response()
    for response in (whole, streamed):
        calls = [json.loads(item.arguments) for item in response.output if item.type == "function_call"]
        assert calls == [{"city": "Oslo"}]
        assert (response.parallel_tool_calls, response.status) == (False, "completed")
        assert response.output_text == answer.partition("<")[0]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a hosted tool", {"tools": [TOOL, {"type": "web_search", "search_context_size": "low"}]}, "tools[1].type"),
    ("the nested form", {"tools": [{"type": "function", "function": {"name": "weather"}}]}, "tools[0].name"),
    ("an unknown field", {"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ("a name", {"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ("strict schema", {"tools": [{**STRICT, "parameters": {"not": {}}}]}, "tools[0].parameters.not"),
    ("a choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ("no tools", {"tool_choice": "required"}, "tool_choice"),
    ("no call_id", {"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
    ("no output", {"input": [{"type": "function_call_output", "call_id": "c1"}]}, "input[0].output"),
    ("a reference", {"input": [{"type": "item_reference", "id": "fc_1"}]}, "input[0].id"),
    ("no items", {"input": []}, "input"),
]  # fmt: skip


@in_shared_loop
@pytest.mark.parametrize(("what", "fields", "param"), REFUSED, ids=[what for what, _, _ in REFUSED])
async def test_what_is_wrong_is_named_by_its_path(model: Bench, what: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(model).responses.create(**{"model": "demo", "input": "x", **fields})
    assert refused.value.param == param
