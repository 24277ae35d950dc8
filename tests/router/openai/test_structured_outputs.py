"""Structured outputs with the official `openai` package and a real model: valid JSON, strict tools, tool choice."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pydantic
import pytest
import pytest_asyncio
from pydantic import BaseModel, ConfigDict, Field
from support.clients.openai_api import client_of, openai_bench, post, tools_worker
from support.cluster.in_process import Bench
from support.engines.guided import check_json
from support.engines.schemas import FLAG, NUMBER, closed
from support.lifetimes import in_one_task

from router.openai.chat import ChatCompletionRequest
from router.openai.fields import read

in_shared_loop = pytest.mark.asyncio(loop_scope="module")

MESSAGES: Any = [{"role": "user", "content": "Tell me about Mia."}]
WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}]
TURN_ON = closed(room={"enum": ["kitchen", "hall"]}, on=FLAG)
TURN_OFF = closed(all=FLAG)


def tool(name: str, parameters: dict[str, Any], strict: bool | None = None) -> Any:
    function = {"name": name, "description": "", "parameters": parameters}
    return {"type": "function", "function": function if strict is None else {**function, "strict": strict}}


def tags(schema: dict[str, Any], trigger: str = "<on=") -> Any:
    structures = [{"begin": "<on=>", "schema": schema, "end": "</on>"}]
    return {"type": "structural_tag", "structures": structures, "triggers": [trigger]}


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]


class Person(BaseModel):
    """The code of a user of the package."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    pets: list[Pet] = Field(max_length=2)
    nickname: Literal["Mi"] | None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """The demo model, with a chat template that takes tools."""
    worker = tools_worker(tmp_path_factory.mktemp("template"), "prefill", "decode")
    async with in_one_task(openai_bench(worker)) as running:
        yield running


@pytest.mark.feature("guided decoding", engine="pytorch", facade="openai")
@in_shared_loop
@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled"])
async def test_parse_returns_the_class_that_was_asked_for(model: Bench, way: dict[str, Any]) -> None:
    answer = await client_of(model).chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Person, max_tokens=200, **way
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert 0 <= person.age <= 120
    assert answer.choices[0].finish_reason == "stop"


@in_shared_loop
async def test_a_stream_parses_to_the_same(model: Bench) -> None:
    async with client_of(model).chat.completions.stream(
        model="demo", messages=MESSAGES, response_format=Person, max_tokens=200, **WAYS[1]
    ) as stream:
        streamed = (await stream.get_final_completion()).choices[0].message.parsed
    whole = await client_of(model).chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Person, max_tokens=200, **WAYS[1]
    )
    assert streamed == whole.choices[0].message.parsed


@pytest.mark.feature("bad words", engine="pytorch", facade="openai")
@in_shared_loop
async def test_bad_words_are_those_of_grpc(model: Bench) -> None:
    client, prompt = client_of(model), "Tell a story about Mia and a fox."
    free = await model.text_of(prompt=prompt, sampling={"temperature": 0}, stopping={"max_tokens": 40})
    more = {"bad_words": [free.split()[1]]}
    held = await model.text_of(prompt=prompt, sampling={"temperature": 0, **more}, stopping={"max_tokens": 40})
    answer = await client.completions.create(
        model="demo", prompt=prompt, max_tokens=40, n=2, temperature=0, extra_body=more
    )
    assert [choice.text for choice in answer.choices] == [held, held]
    assert held != free
    chat = {"messages": [{"role": "user", "parts": [{"text": MESSAGES[0]["content"]}]}]}
    expected = await model.text_of(chat=chat, sampling={"temperature": 0, **more}, stopping={"max_tokens": 40})
    chatted = await client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=40, temperature=0, extra_body=more
    )
    assert chatted.choices[0].message.content == expected
    with pytest.raises(openai.BadRequestError, match=r"bad_words\[1\]"):
        await client.completions.create(model="demo", prompt="x", extra_body={"bad_words": ["a", ""]})


@in_shared_loop
async def test_responses_follow_text_format(model: Bench) -> None:
    answer = await client_of(model).responses.parse(
        model="demo", input="hello", text_format=Pet, temperature=1.0, max_output_tokens=100
    )
    assert isinstance(answer.output_parsed, Pet)


@in_shared_loop
async def test_json_object_is_any_object(model: Bench) -> None:
    answer = await client_of(model).chat.completions.create(
        model="demo", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=40, temperature=0
    )
    (choice,) = answer.choices
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


@in_shared_loop
@pytest.mark.parametrize(
    ("wanted", "expression"),
    [
        ({"choice": ["yes", "no, never"]}, "yes|no, never"),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, "[0-9]{3}-[0-9]{2}"),
        ({"grammar": 'root ::= "a" part\npart ::= "x" | "y"'}, "a[xy]"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"type": "null"}'}, "null"),
    ],
    ids=["choice", "regex", "grammar", "json", "json as text"],
)
async def test_an_answer_follows_structured_outputs_as_in_vllm(
    model: Bench, wanted: dict[str, Any], expression: str
) -> None:
    for way in WAYS:
        more: Any = {"max_tokens": 40, "extra_body": {"structured_outputs": wanted}, **way}
        chat = await client_of(model).chat.completions.create(model="demo", messages=MESSAGES, **more)
        text = await client_of(model).completions.create(model="demo", prompt="hello", **more)
        assert re.fullmatch(expression, chat.choices[0].message.content or "")
        assert re.fullmatch(expression, text.choices[0].text)


@in_shared_loop
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": tags({"type": "boolean"})},
        {"extra_body": {"structured_outputs": {"structural_tag": tags({"type": "boolean"})}}},
        {"extra_body": {"structured_outputs": {"structural_tag": json.dumps(tags({"type": "boolean"}))}}},
    ],
    ids=["response_format", "structured_outputs", "text"],
)
async def test_structural_tags_may_be_asked_for(model: Bench, fields: dict[str, Any]) -> None:
    answer = await client_of(model).chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=30, temperature=1.0, seed=3, **fields
    )
    text = answer.choices[0].message.content or ""
    assert all(re.match("<on=> ?(true|false)</on>", text[at.start() :]) for at in re.finditer("<on=>", text))


def test_structural_tags_are_those_of_grpc() -> None:
    body = read(ChatCompletionRequest, {"messages": MESSAGES, "response_format": tags({"type": "boolean"})})
    [tag] = body.generate_request("r").guided.structural_tags.tags
    assert (tag.begin, tag.json_schema, tag.end, tag.trigger) == ("<on=>", '{"type": "boolean"}', "</on>", "<on=")


@in_shared_loop
async def test_a_keyword_in_text_format_is_named(model: Bench) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "s", "schema": {"properties": {"a": {"not": {}}}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(model).responses.create(model="demo", input="hello", text=wanted)
    assert refused.value.param == "text.format.schema.properties.a.not"


@pytest.mark.feature("tool choice and strict tools", engine="pytorch", facade="openai")
@in_shared_loop
@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled"])
async def test_a_required_call_is_made_by_its_schema(model: Bench, way: dict[str, Any]) -> None:
    tools = [tool("turn_on", TURN_ON), tool("turn_off", TURN_OFF)]
    answer = await client_of(model).chat.completions.create(
        model="demo", messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=200, **way
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    schemas = {"turn_on": TURN_ON, "turn_off": TURN_OFF}
    check_json(call.function.arguments, schemas[call.function.name])
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content or "") == ("tool_calls", "")


@in_shared_loop
async def test_a_named_tool_is_called(model: Bench) -> None:
    tools = [tool("turn_on", TURN_ON), tool("turn_off", TURN_OFF)]
    for name, schema in (("turn_on", TURN_ON), ("turn_off", TURN_OFF)):
        answer = await client_of(model).chat.completions.create(
            model="demo",
            messages=MESSAGES,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": name}},
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == name
        check_json(call.function.arguments, schema)


@in_shared_loop
async def test_a_strict_tool_may_be_called_or_not(model: Bench) -> None:
    answer = await client_of(model).chat.completions.create(
        model="demo", messages=MESSAGES, tools=[tool("turn_on", TURN_ON, strict=True)], max_tokens=30, temperature=0
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}},
        "response_format.json_schema.schema.not",
    ),
    ("choice", {"extra_body": {"structured_outputs": {"choice": ["a", ""]}}}, "structured_outputs.choice[1]"),
    ("regex", {"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
    (
        "json",
        {"extra_body": {"structured_outputs": {"json": {"items": {"not": {}}}}}},
        "structured_outputs.json.items.not",
    ),
    ("two", {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "structured_outputs"),
    ("none", {"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
    ("tag", {"response_format": tags({"not": {}})}, "response_format.structures[0].schema.not"),
    ("trigger", {"response_format": tags({}, trigger="<b")}, "response_format.structures[0].begin"),
    (
        "tag in text",
        {"extra_body": {"structured_outputs": {"structural_tag": "{"}}},
        "structured_outputs.structural_tag",
    ),
    (
        "formats",
        {"response_format": {"type": "json_object"}, "extra_body": {"structured_outputs": {"regex": "a"}}},
        "response_format",
    ),
    ("tool", {"tools": [tool("a", TURN_OFF), tool("b", {"not": {}}, strict=True)]}, "tools[1].function.parameters.not"),
    (
        "name",
        {"tools": [tool("a", TURN_OFF)], "tool_choice": {"type": "function", "function": {"name": "b"}}},
        "tool_choice.function.name",
    ),
    ("no tools", {"tool_choice": "required"}, "tool_choice"),
    (
        "both",
        {"tools": [tool("a", TURN_OFF, strict=True)], "response_format": {"type": "json_object"}},
        "response_format",
    ),
]


@in_shared_loop
@pytest.mark.parametrize(("fields", "param"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
async def test_what_cannot_be_followed_is_named(model: Bench, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(model).chat.completions.create(model="demo", messages=MESSAGES, **fields)
    assert refused.value.param == param


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({}, "type"),
    ({"type": ["json_object"]}, "type"),
    ({"type": "text", "schema": {}}, "schema"),
    ({"type": "json_object", "schema": {"type": "object"}}, "schema"),
    ({"type": "json_schema"}, "json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": None}}, "json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "a", "shema": {}, "schema": {}}}, "json_schema.shema"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}}, "strict": True}, "strict"),
    ({"type": "json_schema", "name": "a", "schema": {}}, "json_schema"),
]


@in_shared_loop
@pytest.mark.parametrize(("wanted", "param"), MALFORMED)
async def test_a_format_that_is_not_as_it_should_be_is_named(model: Bench, wanted: dict[str, Any], param: str) -> None:
    answer = await post(model, "/chat/completions", {"messages": MESSAGES, "response_format": wanted})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"response_format.{param}")


@in_shared_loop
async def test_the_format_of_a_response_has_its_schema_beside_the_type(model: Bench) -> None:
    nested = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    for wanted, param in ((nested, "schema"), ({"type": "json_schema", "name": "a"}, "schema")):
        answer = await post(model, "/responses", {"input": "hi", "text": {"format": wanted}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"text.format.{param}")


def test_the_check_of_answers_finds_wrong_ones() -> None:
    with pytest.raises(pydantic.ValidationError):
        Pet.model_validate_json('{"name": "Rex", "kind": "fish"}')
    with pytest.raises(Exception, match="is not of type"):
        check_json('{"all": 3}', closed(all=NUMBER | FLAG))
