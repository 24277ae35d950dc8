"""Wrong bodies by Anthropic's API: 400 in its form, and the field by its name in the body."""

import gzip
import json
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
from support.clients.anthropic_api import post_message
from support.cluster.in_process import Bench

from router.anthropic.messages import MessagesRequest

TURN: Any = {"role": "user", "content": "hi"}
PLAIN: Any = {"model": "demo", "max_tokens": 3, "messages": [TURN]}
CALLED: Any = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
MARK: Any = {"cache_control": {"type": "ephemeral"}}


def turn(*blocks: Any) -> Any:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


# What is wrong with PLAIN, and how the message begins.
WRONG: dict[str, tuple[Any, str]] = {
    "no limit": ({"max_tokens": None}, "max_tokens: "),
    "a limit of 0": ({"max_tokens": 0}, "max_tokens: "),
    "no turns": ({"messages": []}, "messages: is empty"),
    "no turns but a system prompt": ({"messages": [], "system": "Be brief."}, "messages: is empty"),
    "a tool given twice": ({"tools": [TOOL, TOOL]}, "tools[1].name: is that of tool 0, too"),
    "an unknown field": ({"container": "x"}, "container: Extra inputs"),
    "an unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
    "an unknown block": (turn({"type": "document"}), "messages[0].content[0]: Input tag 'document'"),
    "an unknown source": (
        turn({"type": "image", "source": {"type": "file"}}),
        "messages[0].content[0].source: Input tag 'file'",
    ),
    "an image of another kind": (
        turn({"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": "AA=="}}),
        "messages[0].content[0].source.media_type: ",
    ),
    "a block without its text": (turn({"type": "text"}), "messages[0].content[0].text: Field required"),
    "a result without its call": (turn({"type": "tool_result"}), "messages[0].content[0].tool_use_id: Field required"),
    "a field of a block in a result": (
        turn({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": 1}]}),
        "messages[0].content[0].content[0].text: ",
    ),
    "an image for a model without": (
        turn({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}),
        "demo does not support media",
    ),
    "an answer that is begun": ({"messages": [TURN, {"role": "assistant", "content": "So"}]}, "messages[1].role: "),
    "an empty turn": ({"messages": [{"role": "user", "content": []}]}, "messages[0]: is empty"),
    "a call of a wrong name": (
        {"messages": [TURN, {"role": "assistant", "content": [{**CALLED, "name": "a b"}]}, TURN]},
        "messages[1].content[0].name: ",
    ),
    "a tool of a wrong name": ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name: "),
    "a tool of a server's own": ({"tools": [{**TOOL, "type": "bash_20250124"}]}, "tools[0].type: "),
    "a choice without its name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
    "an unknown choice": ({"tool_choice": {"type": "some"}}, "tool_choice: Input tag 'some'"),
    "a fifth mark": (
        turn(*({"type": "text", "text": "x", **MARK} for _ in range(5))),
        "messages[0].content[4].cache_control: is mark 5 of at most 4",
    ),
    "a mark of the body beside four": (
        {**turn(*({"type": "text", "text": "x", **MARK} for _ in range(4))), **MARK},
        "cache_control: is mark 5 of at most 4",
    ),
    "an unknown ttl": ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl: "),
    "a small budget": ({"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking.budget_tokens: "),
    "a budget over the limit": (
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000},
        "thinking.budget_tokens: must be less",
    ),
    "a wrong temperature": ({"temperature": -1.0}, "temperature: "),
    "an empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences[0]: is empty"),
    "a wrong effort": ({"output_config": {"effort": "none"}}, "output_config.effort: "),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_body_is_refused_by_the_name_of_its_field(served: Bench, name: str) -> None:
    wrong, begins = WRONG[name]
    body = {key: value for key, value in {**PLAIN, **wrong}.items() if value is not None}
    answer = await post_message(served, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(begins)


async def test_other_refusals_have_its_form(served: Bench) -> None:
    too_large = await post_message(served, b" " * (16 * 2**20 + 1))
    unknown = await post_message(served, {}, "/v1/messages/batches")
    no_json = await post_message(served, b"{")
    found = [(one.status_code, one.json()["error"]["type"]) for one in (too_large, unknown, no_json)]
    assert found == [(413, "request_too_large"), (404, "not_found_error"), (400, "invalid_request_error")]


async def test_a_compressed_body_is_refused_in_its_form(served: Bench) -> None:
    answer = await post_message(served, gzip.compress(json.dumps(PLAIN).encode()), **{"content-encoding": "gzip"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (415, "invalid_request_error")
    assert "'gzip'" in error["message"]


def test_a_turn_with_many_thoughts_has_the_memory_of_its_text() -> None:
    thoughts = [{"type": "thinking", "thinking": "x" * 20_000} for _ in range(400)]
    turns = [TURN, {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "So"}]}, TURN]
    body = MessagesRequest.model_validate({**PLAIN, "messages": turns})
    before = getrusage(RUSAGE_SELF).ru_maxrss
    made = body.asked("x").request
    assert made.chat.messages[1].reasoning == "x" * 8_000_000
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 200 * 1024
