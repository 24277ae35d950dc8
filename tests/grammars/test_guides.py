"""The fault of a grammar is named before any model sees it."""

import json

import pytest
from support.engines.schemas import all_schemas

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2 as pb
from grammars.guide import read_guide
from grammars.source import check_guide

NESTED = {"properties": {"list": {"items": {"anyOf": [{"type": "string"}, {"not": {"type": "null"}}]}}}}
DEEP = '{"items":' * 100 + "{}" + "}" * 100


def violation(**fields: object) -> tuple[str, str]:
    """The field that is wrong, and why."""
    with pytest.raises(InvalidRequest) as refused:
        check_guide(read_guide(pb.GuidedDecoding(**fields)))  # type: ignore[arg-type]
    found = refused.value.violations[0]
    return found.field, found.description


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (NESTED, ".properties.list.items.anyOf[1].not"),
        ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
        ({"$defs": {"a": {"if": {}}}, "$ref": "#/$defs/a"}, ".$defs.a.if"),
        ({"properties": {"at": {"type": "string", "format": "moon-phase"}}}, ".properties.at.format"),
        ({"allOf": [{"dependentRequired": {"a": ["b"]}}]}, ".allOf[0].dependentRequired"),
        ({"x-guidance": {"lenient": True}}, ".x-guidance"),
    ],
)
def test_a_keyword_that_is_not_supported_is_named_with_its_path(schema: dict[str, object], path: str) -> None:
    assert violation(json_schema=json.dumps(schema))[0] == f"guided.json_schema{path}"


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({}, "guided", "is empty"),
        ({"json_schema": "{"}, "guided.json_schema", "is not JSON"),
        ({"json_schema": "[1]"}, "guided.json_schema", "must be the text of a JSON object"),
        ({"json_schema": '{"type": "number", "minimum": 3, "maximum": 2}'}, "guided.json_schema", "Unsatisfiable"),
        ({"json_schema": '{"$ref": "https://example.com/schema"}'}, "guided.json_schema.$ref", "outside of the schema"),
        ({"regex": "(a"}, "guided.regex", "unclosed group"),
        ({"regex": r"a?(\<image>)b"}, "guided.regex", "lookarounds"),
        ({"json_schema": r'{"type": "string", "pattern": "\\<a\\>"}'}, "guided.json_schema", "lookarounds"),
        ({"grammar": r"start: /\<a/"}, "guided.grammar", "lookarounds"),
        ({"regex": "(?=a)a"}, "guided.regex", "look-around"),
        ({"grammar": 'start: missing "a"'}, "guided.grammar", "unknown name"),
        ({"grammar": "root ::= ("}, "guided.grammar", "GBNF"),
        ({"grammar": "root ::= missing"}, "guided.grammar", "'missing' not found"),
        ({"grammar": 'first ::= "a"'}, "guided.grammar", "No 'root' rule"),
        ({"grammar": ""}, "guided.grammar", "No 'root' rule"),
        # Its error would be cut within a character.
        ({"json_schema": '{"maxLength": {"a": "x' + "é" * 60 + '"}}'}, "guided.json_schema", "cannot be compiled"),
        ({"choice": {}}, "guided.choice.texts", "1 to 1000"),
        ({"choice": {"texts": ["a", ""]}}, "guided.choice.texts[1]", "is empty"),
        ({"structural_tags": {}}, "guided.structural_tags.tags", "1 to 128"),
        (
            {"structural_tags": {"tags": [{"begin": "<a>", "trigger": "<b"}]}},
            "guided.structural_tags.tags[0].begin",
            "does not begin with the trigger",
        ),
        (
            {"structural_tags": {"tags": [{"begin": "<a>", "json_schema": '{"not": {}}'}]}},
            "guided.structural_tags.tags[0].json_schema.not",
            "not supported",
        ),
    ],
)
def test_a_wrong_grammar_is_refused(fields: dict[str, object], field: str, why: str) -> None:
    found, description = violation(**fields)
    assert found == field
    assert why in description


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": DEEP},
        {"json_schema": "[" * 50_000},
        {"json_schema": json.dumps({"properties": {str(index): {} for index in range(1001)}})},
        {"json_schema": json.dumps({"enum": list(range(10_001))})},
        {"json_schema": '{"title": "' + "x" * 200_000 + '"}'},
        {"regex": "a" * 200_000},
        # Every object beside every other one: 4^10 alternatives.
        {
            "json_schema": json.dumps(
                {
                    "allOf": [
                        {"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {}}} for j in range(4)]}
                        for i in range(10)
                    ]
                }
            )
        },
        {"choice": {"texts": [str(index) for index in range(1001)]}},
    ],
    ids=["deep", "brackets", "properties", "values", "long", "long regex", "exponential", "choices"],
)
def test_a_grammar_that_is_too_large_is_refused(fields: dict[str, object]) -> None:
    assert violation(**fields)[0].startswith("guided.")


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": ""},
        {"json_schema": "true"},
        {"regex": "[0-9]{3}-[a-z]+"},
        {"grammar": 'start: "a" tail\ntail: "b" | "c" tail'},
        {"grammar": 'root ::= "a" tail\ntail ::= "b" | "c" tail'},
        {"choice": {"texts": ["yes", 'no "really"', "vielleicht\n"]}},
        {"structural_tags": {"tags": [{"begin": "<call=f>", "end": "</call>", "trigger": "<call"}]}},
        {"structural_tags": {"tags": [{"begin": "<call>"}], "is_required": True}},
    ],
)
def test_grammars_of_every_kind_are_taken(fields: dict[str, object]) -> None:
    check_guide(read_guide(pb.GuidedDecoding(**fields)))  # type: ignore[arg-type]


def test_every_schema_of_the_collection_is_taken() -> None:
    for _, schema in all_schemas():
        check_guide(read_guide(pb.GuidedDecoding(json_schema=json.dumps(schema))))
