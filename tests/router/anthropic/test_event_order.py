"""The events of messages of the pipeline that have parts of several kinds: clients know a delta by the open block."""

import json
from collections.abc import MutableMapping
from typing import Any

from baton.inference.v1 import generate_pb2
from router.anthropic.answers import MessageHead, MessageStream
from router.openai.call import HttpCall

FIRST = {"id": "a", "name": "f", "arguments": '{"x": 1}'}
SECOND = {"id": "b", "name": "g", "arguments": '{"y": 2}'}


def delta(**fields: Any) -> generate_pb2.GenerateResponse:
    return generate_pb2.GenerateResponse(token=generate_pb2.TokenDelta(**fields))


def piece(index: int, arguments: str, **head: str) -> generate_pb2.ToolCallDelta:
    return generate_pb2.ToolCallDelta(index=index, arguments=arguments, **head)


async def blocks(*messages: generate_pb2.GenerateResponse) -> list[tuple[str, str]]:
    """The blocks that clients make of the events, and what their deltas add up to. Each delta fits the open block."""
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    call = HttpCall({"headers": []}, receive, send)
    stream = MessageStream(call, MessageHead("msg", generate_pb2.GenerateRequest()))
    for message in messages:
        await stream.send(message)
    await stream.send(generate_pb2.GenerateResponse(finished=generate_pb2.Finished()))
    made: list[tuple[str, str]] = []
    fields = {"text_delta": ("text", "text"), "input_json_delta": ("tool_use", "partial_json")}
    is_open = False
    for line in b"".join(sent).decode().splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": ""}
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(made)
                is_open = True
                made.append((event["content_block"]["type"], ""))
            case "content_block_delta":
                kind, field = fields[event["delta"]["type"]]
                assert (is_open, event["index"], made[-1][0]) == (True, len(made) - 1, kind)
                made[-1] = (kind, made[-1][1] + event["delta"][field])
            case "content_block_stop":
                assert is_open
                is_open = False
    assert not is_open
    return made


async def test_the_end_of_a_call_comes_before_the_text_after_it() -> None:
    found = await blocks(
        delta(tool_call_deltas=[piece(0, '{"x": ', id="a", name="f")]),
        delta(text="So: ", tool_call_deltas=[piece(0, "1}")], tool_calls=[FIRST]),
        delta(text="done"),
    )
    assert found == [("tool_use", '{"x": 1}'), ("text", "So: done")]


async def test_one_call_ends_and_another_begins_in_one_message() -> None:
    found = await blocks(
        delta(tool_call_deltas=[piece(0, '{"x": ', id="a", name="f")]),
        delta(tool_call_deltas=[piece(0, "1}"), piece(1, '{"y', id="b", name="g")], tool_calls=[FIRST], text="So"),
        delta(tool_call_deltas=[piece(1, '": 2}')], tool_calls=[SECOND]),
    )
    assert found == [("tool_use", '{"x": 1}'), ("text", "So"), ("tool_use", '{"y": 2}')]


async def test_a_call_that_is_none_is_followed_by_a_whole_one() -> None:
    found = await blocks(
        delta(tool_call_deltas=[piece(0, '{"x": ', id="a", name="f")]),
        delta(tool_calls=[SECOND]),
    )
    assert found == [("tool_use", '{"x": '), ("tool_use", '{"y": 2}')]


async def test_whole_calls_and_growing_ones_are_in_their_order() -> None:
    found = await blocks(
        delta(
            text="So",
            tool_call_deltas=[piece(1, '{"y": 2}', id="b", name="g"), piece(2, "{", id="c", name="f")],
            tool_calls=[FIRST, SECOND],
        )
    )
    assert found == [("text", "So"), ("tool_use", '{"x": 1}'), ("tool_use", '{"y": 2}'), ("tool_use", "{")]
