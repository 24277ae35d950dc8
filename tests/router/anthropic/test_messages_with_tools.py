"""The official `anthropic` package against the router: calls of tools, and their results."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from support.clients.anthropic_api import anthropic_of
from support.clients.openai_api import openai_bench, tools_worker
from support.engines.written_engine import follows, writes, written_engines

MESSAGES: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"model": "demo", "extra_body": {"temperature": 0.0}}
TOOL: Any = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'


@pytest.mark.feature("tools", engine="written", facade="anthropic")
async def test_tools_are_called_whole_and_streamed_and_their_results_taken() -> None:
    with written_engines():
        async with openai_bench(writes("On it." + CALL % "Oslo" + CALL % "Rome")) as running:
            messages = anthropic_of(running).messages
            whole = await messages.create(messages=MESSAGES, max_tokens=500, tools=[TOOL], model="demo")
            text, *calls = whole.content
            assert (text.type, whole.stop_reason) == ("text", "tool_use")
            assert [(call.type, call.name, call.input) for call in calls if call.type == "tool_use"] == [
                ("tool_use", "weather", {"city": "Oslo"}),
                ("tool_use", "weather", {"city": "Rome"}),
            ]
            async with messages.stream(messages=MESSAGES, max_tokens=500, tools=[TOOL], model="demo") as stream:
                final = await stream.get_final_message()
            assert [(one.type, getattr(one, "input", None)) for one in final.content] == [
                ("text", None),
                ("tool_use", {"city": "Oslo"}),
                ("tool_use", {"city": "Rome"}),
            ]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
                for call in calls
                if call.type == "tool_use"
            ]
            for content in (whole.content, final.content, [block.model_dump() for block in final.content]):
                turns: Any = [
                    *MESSAGES,
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": results},
                ]
                again = await messages.create(messages=turns, max_tokens=500, tools=[TOOL], model="demo")
                assert again.usage.input_tokens > whole.usage.input_tokens


async def test_the_packages_loop_of_tools_sends_the_whole_conversation_instead_of_a_thread() -> None:
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather."""
        asked.append(city)
        return "rain"

    with written_engines():
        async with openai_bench(follows([CALL % "Oslo", "Rain."])) as running:
            runner = anthropic_of(running).beta.messages.tool_runner(
                model="demo", max_tokens=500, messages=MESSAGES, tools=[weather]
            )
            answer = await runner.until_done()
    assert (asked, answer.stop_reason, answer.content[0].type) == (["Oslo"], "end_turn", "text")


@pytest.mark.feature("tool arguments as they come", engine="written", facade="anthropic")
async def test_arguments_come_as_they_are_written() -> None:
    asked: Any = {"messages": MESSAGES, "tools": [TOOL], "model": "demo", "stream": True}
    with written_engines():
        async with openai_bench(writes("On it." + CALL % "Oslo" + CALL % "Rome", token_seconds=0.002)) as running:
            create = anthropic_of(running).messages.create
            events = [event async for event in await create(max_tokens=500, **asked)]
            cut = [event async for event in await create(max_tokens=60, **asked)]
    pieces: dict[int, list[str]] = {1: [], 2: []}
    for event in events:
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            pieces[event.index].append(event.delta.partial_json)
    assert [json.loads("".join(each)) for each in pieces.values()] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert min(map(len, pieces.values())) > 1
    opened = [event.index for event in events if event.type == "content_block_start"]
    assert opened == [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2]
    assert [event.type for event in cut[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert [event.delta.stop_reason for event in cut if event.type == "message_delta"] == ["max_tokens"]


async def test_a_call_that_turns_out_to_be_none_is_not_one_to_answer() -> None:
    with written_engines():
        broken = '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call> Done.'
        async with openai_bench(writes(broken)) as running:
            messages = anthropic_of(running).messages
            whole = await messages.create(messages=MESSAGES, max_tokens=500, tools=[TOOL], model="demo")
            stream = await messages.create(messages=MESSAGES, max_tokens=500, tools=[TOOL], model="demo", stream=True)
            reasons = [event.delta.stop_reason async for event in stream if event.type == "message_delta"]
    assert [block.text for block in whole.content if block.type == "text"] == [broken]
    assert (whole.stop_reason, reasons) == ("end_turn", ["end_turn"])


async def test_a_choice_of_tools_is_followed() -> None:
    with written_engines():
        async with openai_bench(writes(CALL % "Oslo" + CALL % "Rome")) as running:
            create = anthropic_of(running).messages.create
            asked: Any = {"messages": MESSAGES, "max_tokens": 500, "tools": [TOOL], "model": "demo"}
            one = await create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
            assert [block.type for block in one.content] == ["tool_use"]
            none = await create(**asked, tool_choice={"type": "none"})
            assert [block.type for block in none.content] == ["text"]


@pytest.mark.feature("tool choice and strict tools", engine="pytorch", facade="anthropic")
async def test_a_tool_that_must_be_called_is_called(tmp_path: Path) -> None:
    async with openai_bench(tools_worker(tmp_path, "prefill", "decode")) as running:
        create = anthropic_of(running).messages.create
        schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            tools: Any = [{**TOOL, "input_schema": {**schema, "additionalProperties": False}}]
            answer = await create(messages=MESSAGES, max_tokens=100, tools=tools, tool_choice=choice, **GREEDY)
            [call] = answer.content
            assert call.type == "tool_use"
            assert (call.input, answer.stop_reason) == ({"city": "Oslo"}, "tool_use")
        wrong: Any = [{**TOOL, "input_schema": {"type": "object", "uniqueItems": 3}}]
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema"):
            await create(messages=MESSAGES, max_tokens=100, tools=wrong, tool_choice={"type": "any"}, **GREEDY)
        other: Any = {"type": "tool", "name": "other"}
        with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.name: no tool"):
            await create(messages=MESSAGES, max_tokens=100, tools=[TOOL], tool_choice=other, **GREEDY)


async def test_a_result_that_failed_is_told_to_the_model() -> None:
    with written_engines():
        async with openai_bench(writes("x")) as running:
            count = anthropic_of(running).messages.count_tokens
            call = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "c", "content": "no"}
            turns: Any = [*MESSAGES, {"role": "assistant", "content": [call]}]
            good = await count(messages=[*turns, {"role": "user", "content": [result]}], model="demo")
            failed: Any = [*turns, {"role": "user", "content": [{**result, "is_error": True}]}]
            bad = await count(messages=failed, model="demo")
    assert bad.input_tokens - good.input_tokens == len("Error: ")
