"""Guided calls are written in each model's own format, as its parser reads them."""

import json
from collections.abc import Sequence

import pytest

from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2
from grammars.checking import check_guide
from grammars.guide import read_guide
from router.text.parsing.formats import DEEPSEEK, HERMES, LLAMA, MISTRAL, ToolFormat
from router.text.parsing.parts import ToolCall
from router.text.parsing.tool_grammar import guided_calls, name_tools, wants_guided_calls

SCHEMA = json.dumps({"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]})
FORMATS = [HERMES, LLAMA, MISTRAL, DEEPSEEK]


def chat(strict: Sequence[bool] = (False, True), **choice: object) -> generate_pb2.ChatInput:
    made = generate_pb2.ChatInput()
    for index, is_strict in enumerate(strict):
        made.tools.add(name=f"tool_{index}", parameters=SCHEMA, is_strict=is_strict)
    if choice:
        made.tool_choice.CopyFrom(generate_pb2.ToolChoice(**choice))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("choice", [{}, {"is_required": True}, {"name": "tool_1"}], ids=["auto", "required", "named"])
def test_every_format_has_a_grammar(tools: ToolFormat, choice: dict[str, object]) -> None:
    guided = guided_calls(chat(**choice), tools)
    check_guide(read_guide(guided))
    assert guided.structural_tags.is_required == bool(choice)
    assert len(guided.structural_tags.tags) == (1 if "name" in choice else 2)


@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_a_guided_call_is_read_as_one(tools: ToolFormat) -> None:
    tag = guided_calls(chat(name="tool_0"), tools).structural_tags.tags[0]
    parser = tools.open({"tool_0"})
    parts = [*parser.push(f'{tag.begin}{{"on": true}}{tag.end}'), *parser.flush()]
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    assert calls == [("tool_0", {"on": True})]


def test_only_strict_tools_follow_their_schema_where_the_model_chooses() -> None:
    tags = guided_calls(chat(), HERMES).structural_tags.tags
    assert [tag.json_schema for tag in tags] == ["", SCHEMA]


def test_a_wrong_schema_is_named_by_its_tool() -> None:
    asked = chat(name="tool_1")
    asked.tools[1].parameters = '{"not": {}}'
    with pytest.raises(InvalidRequest) as refused:
        check_guide(read_guide(guided_calls(asked, HERMES)))
    assert name_tools(refused.value, asked).violations[0].field == "chat.tools[1].parameters.not"


def test_what_cannot_be_guided_is_refused() -> None:
    assert not wants_guided_calls(chat((False, False)))
    with pytest.raises(InvalidRequest, match="needs tools"):
        guided_calls(chat((), is_required=True), HERMES)
    with pytest.raises(InvalidRequest, match="no tool is called 'other'"):
        guided_calls(chat(name="other"), HERMES)
    with pytest.raises(Unsupported):
        guided_calls(chat(is_required=True), None)
