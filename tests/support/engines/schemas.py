"""200 JSON Schemas for guided decoding: the features of JSON Schema's own test suite, nested, recursive, with unions,
formats and large enums.

A tiny model may write on until its context ends, so that everything is bounded: strings by maxLength, numbers by both
ends, arrays by maxItems, objects by additionalProperties or maxProperties. A recursive schema ends where the model
chooses the alternative without recursion.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "maxLength": 6}
NUMBER: Schema = {"type": "integer", "minimum": -50, "maximum": 50}
FLAG: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
# Not date-time: nothing bounds the digits of a second's fraction.
FORMATS = ("date", "ipv4", "ipv6", "uuid")


def closed(**properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def listed(items: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def all_schemas() -> Sequence[tuple[str, Schema]]:
    """Names and schemas, always the same 200."""
    found = [*_scalars(), *_arrays(), *_objects(), *_unions(), *_references(), *_like_real_ones()]
    for index in range(200 - len(found)):
        found.append((f"mixed-{index}", _mixed(index)))
    assert len({json.dumps(schema) for _, schema in found}) == 200
    return found


def some_schemas(count: int = 25) -> Sequence[tuple[str, Schema]]:
    """Every eighth one."""
    return all_schemas()[:: 200 // count]


def _scalars() -> Iterator[tuple[str, Schema]]:
    yield from {
        "boolean": FLAG,
        "null": NOTHING,
        "word": WORD,
        "const-text": {"const": "fixed"},
        "const-number": {"const": 12.5},
        "const-object": {"const": {"a": [1, 2, {"b": None}]}},
        "const-escapes": {"const": 'quote " backslash \\ newline \n é 漢 😀'},
        "enum-mixed": {"enum": [1, "one", None, True, [1], {"one": 1}]},
        "enum-numbers": {"enum": [3, 5, 8, 13]},
        "types": {"type": ["null", "boolean"]},
        "string-lengths": {"type": "string", "minLength": 3, "maxLength": 5},
        "string-empty": {"type": "string", "maxLength": 0},
        "integer-range": {"type": "integer", "minimum": 7, "maximum": 12},
        "integer-exclusive": {"type": "integer", "exclusiveMinimum": -4, "exclusiveMaximum": 4},
        "integer-multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70},
        "integer-large": {"type": "integer", "minimum": 10**9, "maximum": 10**9 + 10**6},
        "number-exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
    }.items()
    for most in (1, 10, 99, 1000, 4096):
        yield f"integer-to-{most}", {"type": "integer", "minimum": 0, "maximum": most}
    for name in FORMATS:
        yield f"format-{name}", {"type": "string", "format": name}
    for index, pattern in enumerate(
        (
            "^[a-f]{2,4}$",
            "^(red|green|blue)$",
            r"^\d{3}-\d{4}$",
            "^a.c$",
            r"^[A-Z][a-z]{1,5}$",
            r"^[^\s]{2}$",
            "^(ab){1,3}$",
        )
    ):
        yield f"pattern-{index}", {"type": "string", "pattern": pattern}
    for count in (10, 100, 1000):
        yield f"enum-of-{count}", {"enum": [f"value {index:04}" for index in range(count)]}


def _arrays() -> Iterator[tuple[str, Schema]]:
    for least, most in ((0, 0), (0, 2), (1, 1), (2, 4), (5, 5)):
        yield f"array-{least}-{most}", listed(NUMBER, most, least)
    for name, items in (("words", WORD), ("flags", FLAG), ("nothing", NOTHING), ("objects", closed(a=FLAG))):
        yield f"array-of-{name}", listed(items)
    yield "array-nested", listed(listed(listed(FLAG, 2), 2), 2)
    yield "tuple", {"type": "array", "prefixItems": [FLAG, NUMBER, WORD], "items": False, "minItems": 3}
    yield "tuple-short", {"type": "array", "prefixItems": [FLAG, NUMBER], "items": False}
    yield "tuple-and-rest", {"type": "array", "prefixItems": [WORD], "items": FLAG, "minItems": 1, "maxItems": 3}
    yield "array-of-any-of", listed({"anyOf": [FLAG, NUMBER, NOTHING]}, 4, 1)


def _objects() -> Iterator[tuple[str, Schema]]:
    yield "object-empty", closed()
    for count in (1, 2, 5, 12):
        yield f"object-of-{count}", closed(**{f"field_{index}": FLAG for index in range(count)})
    yield "object-optional", {**closed(a=FLAG, b=NUMBER, c=NOTHING), "required": []}
    yield "object-half-optional", {**closed(a=FLAG, b=NUMBER, c=NOTHING, d=FLAG), "required": ["b", "d"]}
    yield (
        "object-names",
        closed(**{"with space": FLAG, 'with "quotes"': FLAG, "mit Ümlaut": FLAG, "$dollar": FLAG, "": FLAG}),
    )
    yield (
        "object-additional",
        {
            "type": "object",
            "properties": {"a": FLAG},
            "required": ["a"],
            "additionalProperties": False,
            "patternProperties": {"^x[0-9]$": NUMBER},
            "maxProperties": 2,
        },
    )
    depth: Schema = FLAG
    for level in range(1, 9):
        depth = closed(inner=depth)
        yield f"object-deep-{level}", depth
    yield "object-in-arrays", closed(rows=listed(closed(cells=listed(NUMBER, 2)), 2))


def _unions() -> Iterator[tuple[str, Schema]]:
    yield "any-of-types", {"anyOf": [FLAG, NUMBER, NOTHING]}
    yield "one-of-types", {"oneOf": [FLAG, NUMBER, WORD]}
    yield "any-of-objects", {"anyOf": [closed(kind={"const": "a"}, a=FLAG), closed(kind={"const": "b"}, b=NUMBER)]}
    yield "one-of-objects", {"oneOf": [closed(kind={"const": "a"}, a=FLAG), closed(kind={"const": "b"}, b=NUMBER)]}
    yield "any-of-nested", {"anyOf": [listed({"anyOf": [FLAG, NOTHING]}, 2), closed(x={"anyOf": [NUMBER, NOTHING]})]}
    yield "all-of-ranges", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}
    yield (
        "all-of-objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": FLAG}, "required": ["a"]},
                {"type": "object", "properties": {"b": NUMBER}, "required": ["b"]},
            ],
            "maxProperties": 2,
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
        },
    )
    yield "optional-value", closed(value={"anyOf": [WORD, NOTHING]})


def _references() -> Iterator[tuple[str, Schema]]:
    yield "ref", {"$defs": {"flag": FLAG}, "$ref": "#/$defs/flag"}
    yield (
        "ref-chain",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": NUMBER}, "$ref": "#/$defs/a"},
    )
    yield "ref-definitions", {"definitions": {"it": closed(a=FLAG)}, **listed({"$ref": "#/definitions/it"}, 2)}
    yield "ref-to-property", {**closed(a=FLAG, b={"$ref": "#/properties/a"})}
    yield "ref-escaped", {"$defs": {"a/b": FLAG}, "$ref": "#/$defs/a~1b"}
    yield (
        "recursive-list",
        {
            "$defs": {"node": closed(value=FLAG, next={"anyOf": [NOTHING, {"$ref": "#/$defs/node"}]})},
            "$ref": "#/$defs/node",
        },
    )
    yield "recursive-root", closed(value=FLAG, children=listed({"$ref": "#"}, 1))
    yield (
        "recursive-mutual",
        {
            "$defs": {
                "even": closed(odd={"anyOf": [NOTHING, {"$ref": "#/$defs/odd"}]}),
                "odd": closed(even={"anyOf": [NOTHING, {"$ref": "#/$defs/even"}]}),
            },
            "$ref": "#/$defs/even",
        },
    )


def _like_real_ones() -> Iterator[tuple[str, Schema]]:
    address = closed(street=WORD, city=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"})
    yield "person", closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 130}, address=address)
    yield (
        "invoice",
        closed(
            number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
            date={"type": "string", "format": "date"},
            lines=listed(closed(item=WORD, quantity={"type": "integer", "minimum": 1, "maximum": 99}), 2, 1),
        ),
    )
    yield "tool-call", closed(name={"enum": ["get_weather", "search"]}, arguments=closed(city=WORD))
    yield "classification", closed(label={"enum": ["positive", "negative", "neutral"]}, sure=FLAG)
    yield "extraction", closed(entities=listed(closed(text=WORD, kind={"enum": ["person", "place"]}), 2))
    yield "steps", closed(steps=listed(closed(explanation=WORD, output=WORD), 2, 1), final_answer=WORD)


def _mixed(index: int) -> Schema:
    """Combinations of the parts, each different."""
    parts: list[Schema] = [FLAG, NUMBER, WORD, NOTHING, {"enum": ["x", "y", index]}, {"const": index}, listed(FLAG, 2)]
    first, second, third = (parts[(index // 7**place + place) % 7] for place in range(3))
    match index % 4:
        case 0:
            return closed(**{f"a{index}": first, "b": second, "c": closed(d=third)})
        case 1:
            return {**closed(a=first, b=second, c=third), "required": ["b"], "title": f"Mixed {index}"}
        case 2:
            return listed({"anyOf": [closed(a=first), closed(**{f"b{index}": second})]}, 2, 1)
        case _:
            node = closed(**{f"v{index}": first, "next": {"anyOf": [NOTHING, {"$ref": "#/$defs/node"}]}})
            return {"$defs": {"node": node}, **closed(head={"$ref": "#/$defs/node"}, tail=second)}
