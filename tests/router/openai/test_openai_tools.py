"""Calls of tools and reasoning, as the official `openai` package reads them."""

import json
from typing import Any

import openai
import pytest
from support.clients.openai_api import client_of, openai_bench
from support.cluster.in_process import Bench
from support.engines.written_engine import HERMES_TEMPLATE, REASONING_TEMPLATE, writes, written_engines

MESSAGES: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.feature("tools", engine="written", facade="openai")
async def test_tools_are_called_whole_and_streamed() -> None:
    answer = 'On it.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    with written_engines():
        async with openai_bench(writes(answer)) as running:
            client = client_of(running)
            whole = await client.chat.completions.create(model="demo", messages=MESSAGES, tools=[TOOL])
            (call,) = whole.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
            assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", "On it.")
            async with client.chat.completions.stream(model="demo", messages=MESSAGES, tools=[TOOL]) as stream:
                final = (await stream.get_final_completion()).choices[0]
            (streamed,) = final.message.tool_calls or []
            assert (streamed.function.name, final.finish_reason) == ("weather", "tool_calls")
            turns = [
                *MESSAGES,
                whole.choices[0].message.model_dump(),
                {"role": "tool", "tool_call_id": call.id, "content": "rain"},
                final.message.model_dump(),
                {"role": "tool", "tool_call_id": streamed.id, "content": "rain"},
            ]
            again = await client.chat.completions.create(model="demo", messages=turns, tools=[TOOL])
            assert again.usage is not None
            assert whole.usage is not None
            assert again.usage.prompt_tokens > whole.usage.prompt_tokens
            silent = await client.chat.completions.create(
                model="demo", messages=MESSAGES, tools=[TOOL], tool_choice="none"
            )
            assert silent.choices[0].message.content == answer


@pytest.mark.feature("tool arguments as they come", engine="written", facade="openai")
async def test_arguments_come_as_they_are_written() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
    asked: Any = {"model": "demo", "messages": MESSAGES, "tools": [TOOL], "stream": True}
    with written_engines():
        async with openai_bench(writes("On it." + call % "Oslo" + call % "Rome", token_seconds=0.002)) as running:
            create = client_of(running).chat.completions.create
            chunks = [chunk async for chunk in await create(**asked)]
            cut = [chunk async for chunk in await create(max_tokens=60, **asked)]
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or []:
            pieces[piece.index].append(piece)
    for index, city in enumerate(("Oslo", "Rome")):
        assert json.loads("".join(piece.function.arguments for piece in pieces[index])) == {"city": city}
        assert [piece.function.name for piece in pieces[index] if piece.id] == ["weather"]
        assert len(pieces[index]) > 1
    assert (chunks[-1].choices[0].finish_reason, cut[-1].choices[0].finish_reason) == ("tool_calls", "length")


TWO_CALLS = {
    HERMES_TEMPLATE: 'On it.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' + 1000 * "Done.",
    HERMES_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"): 'On it.[TOOL_CALLS][{"name": "weather", "arguments": '
    '{"city": "Oslo"}}, {"name": "weather", "arguments": {"city": "Rome"}}]',
    HERMES_TEMPLATE.replace("<tool_call>", "<|python_tag|>"): '{"name": "weather", "parameters": {"city": "Oslo"}}; '
    '{"name": "weather", "parameters": {"city": "Rome"}}',
}


@pytest.mark.parametrize(("template", "answer"), TWO_CALLS.items(), ids=["hermes", "mistral", "llama"])
async def test_without_parallel_calls_the_first_call_ends_the_answer(template: str, answer: str) -> None:
    with written_engines():
        async with openai_bench(writes(answer, template)) as running:
            client = client_of(running)
            request: Any = {"model": "demo", "messages": MESSAGES, "tools": [TOOL]}
            both = await client.chat.completions.create(**request, parallel_tool_calls=True)
            one = await client.chat.completions.create(**request, parallel_tool_calls=False)
            async with client.chat.completions.stream(**request, parallel_tool_calls=False) as stream:
                streamed = await stream.get_final_completion()
            raw: Any = {"separate_reasoning": False}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**request, parallel_tool_calls=False, extra_body=raw)
    assert len(both.choices[0].message.tool_calls or []) == 2
    for found in (one, streamed):
        (call,) = found.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        assert found.choices[0].finish_reason == "tool_calls"
    assert refused.value.param == "parallel_tool_calls"


async def test_fields_that_a_client_adds_to_an_answer_are_read_over_when_they_come_back(served: Bench) -> None:
    extra = {"provider_specific_fields": {"refusal": None}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}", **extra}, **extra}
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], **extra},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = await client_of(served).chat.completions.create(model="demo", messages=turns, max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens


async def test_a_streamed_call_has_no_empty_chunks() -> None:
    answer = '<tool_call>{"name": "weather", "arguments": {"city": "the </tool_call> of Oslo"}}</tool_call>'
    with written_engines():
        async with openai_bench(writes(answer)) as running:
            stream = await client_of(running).chat.completions.create(
                model="demo", messages=MESSAGES, tools=[TOOL], stream=True
            )
            deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) async for chunk in stream]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [list(delta) for delta in deltas[1:]] == [["tool_calls"], []]
    function = deltas[1]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"city": "the </tool_call> of Oslo"}


@pytest.mark.feature("reasoning", engine="written", facade="openai")
async def test_reasoning_is_apart_from_the_content() -> None:
    with written_engines():
        async with openai_bench(writes("hm</think>\nYes.", REASONING_TEMPLATE)) as running:
            client = client_of(running)
            message = (await client.chat.completions.create(model="demo", messages=MESSAGES)).choices[0].message
            assert (message.content, message.reasoning_content) == ("Yes.", "hm")  # type: ignore[attr-defined]
            stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"


@pytest.mark.feature("Responses API", engine="written", facade="openai")
async def test_the_reasoning_of_a_response_is_an_item_of_its_own() -> None:
    with written_engines():
        async with openai_bench(writes("hm</think>\nYes.", REASONING_TEMPLATE)) as running:
            client = client_of(running)
            whole = await client.responses.create(model="demo", input="hello")
            async with client.responses.stream(model="demo", input="hello") as helper:
                events = [event async for event in helper]
                streamed = await helper.get_final_response()
            for response in (whole, streamed):
                assert [item.type for item in response.output] == ["reasoning", "message"]
                assert response.output[0].content[0].text == "hm"  # type: ignore[union-attr, index]
                assert response.output_text == "Yes."
            deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            assert "".join(deltas) == "hm"
            # A client sends back what it got.
            turns: Any = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in whole.output), *MESSAGES]
            again = await client.responses.create(model="demo", input=turns)
            assert again.output_text == "Yes."
