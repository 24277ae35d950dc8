"""JSON Schemas are followed as JSON Schema means them, or refused by the path of what cannot be followed."""

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from support.engines.checkpoints import DEMO

from baton.errors import InvalidRequest
from grammars.guide import Guide, GuideKind
from grammars.source import PARSER_LIMITS, check_guide, grammar_source
from services.engines.base import ModelFiles
from services.engines.guidance.vocabulary import open_vocabulary

END = 2
VOCABULARY = open_vocabulary(ModelFiles(tokenizer_json=(DEMO / "tokenizer.json").read_bytes()), 768, (END,))
assert VOCABULARY is not None
TOKENIZER = VOCABULARY.tokenizer
Bounds = dict[str, Any]


def guide_of(text: str) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, text)


def matcher_of(schema: object) -> LLMatcher:
    source = grammar_source(guide_of(json.dumps(schema)))
    return LLMatcher(TOKENIZER, source, log_level=0, limits=PARSER_LIMITS)


def follows(matcher: LLMatcher, text: str) -> bool:
    ids = TOKENIZER.tokenize_str(text)
    walked = matcher.deep_copy()
    return bool(walked.try_consume_tokens(ids) == len(ids) and walked.is_accepting())


def wander(matcher: LLMatcher, choose: Random) -> str | None:
    """A random answer that the grammar allows; None if it does not end soon."""
    walked, ids = matcher.deep_copy(), []
    for _ in range(300):
        bits = np.unpackbits(np.frombuffer(walked.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(token) for token in bits.nonzero()[0]]
        assert allowed or walked.is_stopped(), walked.get_error()
        if walked.is_stopped() or (END in allowed and (allowed == [END] or choose.random() < 0.4)):
            return str(TOKENIZER.decode_str(ids))
        ids.append(choose.choice([token for token in allowed if token != END]))
        assert walked.consume_token(ids[-1]), walked.get_error()
    return None


BOUND = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([-1.5, -0.5, -0.05, 0.05, 0.5, 1.25, 1.5, 2.5]),
    st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, 2**63, -(2**63), 10**20]),
)
BOUNDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number", ["number", "null"]])},
    optional={
        "minimum": BOUND,
        "maximum": BOUND,
        "exclusiveMinimum": BOUND,
        "exclusiveMaximum": BOUND,
        "multipleOf": st.sampled_from([2, 3, 0.5]),
    },
)
SCHEMAS = st.recursive(
    st.one_of(
        BOUNDS,
        st.tuples(BOUNDS, BOUNDS).map(lambda pair: {"allOf": list(pair)}),
        st.tuples(BOUNDS, BOUNDS).map(lambda pair: {"anyOf": list(pair)}),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 4)] * 2
        ),
        st.builds(lambda value: {"const": value}, st.one_of(BOUND, st.text(max_size=5), st.booleans(), st.none())),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.dictionaries(st.sampled_from(["a", "b", "<image>"]), inner, max_size=3).map(
            lambda named: {
                "type": "object",
                "properties": named,
                "required": sorted(named)[:2],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
@example(schema={"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, seed=0)
@example(schema={"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, seed=2)
def test_any_answer_that_a_schema_allows_is_valid(schema: dict[str, Any], seed: int) -> None:
    try:
        check_guide(guide_of(json.dumps(schema)))
    except InvalidRequest:
        return
    matcher = matcher_of(schema)
    choose = Random(seed)
    for _ in range(5):
        text = wander(matcher, choose)
        # jsonschema computes with floating-point numbers, which end at 1e308.
        if text is not None and len(text) < 250 and "Infinity" not in json.dumps(json.loads(text)):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.001", "0"),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "1.25", "1"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "-0.5", "-0"),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "-1.5", "-1"),
        ({"allOf": [{"type": "number", "maximum": 0.5}, {"exclusiveMinimum": 0}]}, "0.5", "0"),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 2}, "1", "0"),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": False, "maximum": 2}, "0", "3"),
        ({"type": "number", "minimum": 0, "maximum": 2, "exclusiveMaximum": True}, "1.5", "2"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**53 - 1), str(2**53 + 1)),
        ({"$ref": "#/x/0", "x": [{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}]}, "0.001", "0"),
        ({"$ref": "#/a~1b%20c", "a/b c": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}}, "1", "0"),
        ({"$ref": "https://a.b/c#/x", "$id": "https://a.b/c", "x": {"const": 2}}, "2", "1"),
        ({"items": {"$ref": "#"}, "type": "array"}, "[[]]", "1"),
        ({"type": "integer", "format": "int32", "minimum": 1}, str(2**31 - 1), str(2**31)),
        ({"type": "integer", "format": "int64", "exclusiveMinimum": 0}, "1", "0"),
        ({"type": ["null", "number"], "format": "double"}, "0.5", '"a"'),
        ({"type": "string", "format": "password", "maxLength": 1}, '"a"', '"ab"'),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": False}, "[1,1]", "[2]"),
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"enum": [1]}}, '{"a":1}', '{"a":2}'),
        ({"required": ["a"], "minProperties": 2, "properties": {"a": {"enum": [1]}}}, '{"a":1,"b":2}', '{"a":1}'),
    ],
)
def test_bounds_are_followed_exactly(schema: Bounds, right: str, wrong: str) -> None:
    matcher = matcher_of(schema)
    assert follows(matcher, right)
    assert not follows(matcher, wrong)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"type": "integer", "minimum": 9007199254740993}', "minimum"),
        ('{"items": {"exclusiveMaximum": -10000000000000000000000}}', "items.exclusiveMaximum"),
        ('{"const": 9007199254740993}', "const"),
        ('{"enum": [1, {"a": [18446744073709551616]}]}', "enum[1].a[0]"),
        ('{"properties": {"a": {"type": "string", "type": "integer"}}}', "properties.a.type"),
        ('{"const": {"b": 1, "b": 2}}', "const.b"),
        ('{"type": "number", "minimum": 1e400}', "minimum"),
        ('{"type": "number", "maximum": NaN}', "maximum"),
        ('{"$ref": "#/x/y", "x": {"y": {"items": {"not": {}}}}}', "x.y.items.not"),
        ('{"items": {"$ref": "#/x"}, "x": {"enum": [9007199254740993]}}', "x.enum[0]"),
        ('{"$ref": "#/enum/0", "enum": [{"uniqueItems": true}]}', "enum[0].uniqueItems"),
        ('{"$ref": "#/title", "title": "a"}', "title"),
        ('{"$ref": "#/x", "x": {"x-guidance": {"lenient": true}}}', "x.x-guidance"),
        ('{"items": {"$ref": "#/none"}}', "items.$ref"),
        ('{"items": {"$ref": 5}}', "items.$ref"),
        ('{"$ref": "https://a.b/c"}', "$ref"),
        ('{"items": {"$id": "https://a.b/c", "$ref": "#/x"}, "x": {}}', "items.$id"),
        ('{"items": {"minProperties": 2}}', "items.minProperties"),
        ('{"required": ["a", "a"], "minProperties": 3, "patternProperties": {"^x": {}}}', "minProperties"),
        ('{"propertyNames": {"pattern": "^a"}}', "propertyNames"),
        ('{"type": "string", "format": "int32"}', "format"),
        ('{"type": "integer", "format": "int16"}', "format"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused_by_their_path(text: str, path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_guide(guide_of(text))
    assert refused.value.violations[0].field == f"guided.json_schema.{path}"
