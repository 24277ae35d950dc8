"""Guided calls are written in each model's own format, as its parser reads them."""

import json
from collections.abc import Sequence

import pytest
from llguidance import LLMatcher
from support.engines.checkpoints import DEMO

from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2
from grammars.guide import read_guide
from grammars.source import check_guide, grammar_source
from router.text.parsing.formats import DEEPSEEK, HERMES, LLAMA, MISTRAL, ToolFormat
from router.text.parsing.parts import ToolCall
from router.text.parsing.tool_grammar import guided_calls, name_tools, wants_guided_calls
from services.engines.base import ModelFiles
from services.engines.guidance.vocabulary import open_vocabulary

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


ON = '{"properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": false}'
LINKED = f'{{"$defs": {{"on": {ON}}}, "$ref": "#/$defs/on"}}'
RIGHT = {"": "{}", "{}": '{"a": 1}', " { } ": "{}", "true": "{}"}


@pytest.mark.parametrize("choice", [{"is_required": True}, {"name": "tool_0"}], ids=["required", "named"])
@pytest.mark.parametrize(
    "parameters",
    ["", "{}", " { } ", "true", ON, LINKED, '{"type": ["null", "object"]}', f'{{"anyOf": [{ON}, {{"type": "null"}}]}}'],
)
def test_the_arguments_of_a_call_are_always_an_object(parameters: str, choice: dict[str, object]) -> None:
    asked = chat((False,), **choice)
    asked.tools[0].parameters = parameters
    guide = read_guide(guided_calls(asked, HERMES))
    check_guide(guide)
    vocabulary = open_vocabulary(ModelFiles(tokenizer_json=(DEMO / "tokenizer.json").read_bytes()), 768, (2,))
    assert vocabulary is not None
    matcher = LLMatcher(vocabulary.tokenizer, grammar_source(guide), log_level=0)
    begin, end = guide.tags[0].begin, guide.tags[0].end
    for arguments, is_allowed in ((RIGHT.get(parameters, '{"on": true}'), True), ("7", False), ("null", False)):
        ids = vocabulary.tokenizer.tokenize_str(begin + arguments + end)
        assert (matcher.validate_tokens(ids) == len(ids)) == is_allowed


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ('{"type": "string"}', "chat.tools[0].parameters.type"),
        ('{"type": ["string", "null"]}', "chat.tools[0].parameters.type"),
        ("false", "chat.tools[0].parameters"),
        ("7", "chat.tools[0].parameters"),
        ('{"required": ["a"], "required": ["b"]}', "chat.tools[0].parameters.required"),
        ('{"const": 7}', "chat.tools[0].parameters"),
    ],
)
def test_arguments_that_can_be_no_object_are_refused(parameters: str, field: str) -> None:
    asked = chat((False,), is_required=True)
    asked.tools[0].parameters = parameters
    with pytest.raises(InvalidRequest) as refused:
        check_guide(read_guide(guided_calls(asked, HERMES)))
    assert name_tools(refused.value, asked).violations[0].field == field


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
