"""JSON Schemas: their size, their references, and the keywords that cannot be followed, each with its path."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any
from urllib.parse import unquote

from baton.errors import FieldViolation, InvalidRequest
from grammars.bounds import LARGEST_INTEGER, is_inexact, is_number, out_of_range, rewrite_bounds

MAX_DEPTH = 64
MAX_PROPERTIES = 1000
MAX_ENUM_VALUES = 10_000
_MAX_VIOLATIONS = 20

UNSUPPORTED_KEYWORDS = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Keywords of JSON Schema that the grammar compiler does not follow."""

# Of these the values that constrain nothing, as programs write them: such a keyword is dropped.
_IDLE = {"uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"})}

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""The values of `format` that are followed."""

# Those of OpenAPI, which say how a value is stored: its type, or bounds in their place, constrain it as much.
_STORED_AS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "int32": ("integer", {"minimum": -(2**31), "maximum": 2**31 - 1}),
    "int64": ("integer", {"minimum": -(2**63), "maximum": 2**63 - 1}),
    "float": ("number", {}),
    "double": ("number", {}),
    "password": ("string", {}),
}

_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTED_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "additionalItems", "contentSchema")


class _Repeating(dict[str, Any]):
    """An object that gives `key` more than once."""

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeating = _Repeating(found)
    repeating.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return repeating


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


@dataclass(frozen=True, slots=True)
class _Place:
    """A subschema, and where it is."""

    path: str
    depth: int
    schema: object


def read_schema(text: str, path: str) -> dict[str, Any] | bool:
    """Returns the schema. Raises InvalidRequest below `path` if it is no schema, too large, or has keywords that
    cannot be followed.
    """
    try:
        schema = _DECODER.decode(text) if text else {"type": "object"}
    except RecursionError:
        raise InvalidRequest.of(path, f"is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise InvalidRequest.of(path, f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest.of(path, "must be the text of a JSON object")
    if "\\u" in text:
        _require_pairs(schema, path)
    _check(schema, path)
    found = [place.schema for place in _places(_Place(path, 0, schema)) if isinstance(place.schema, dict)]
    for one in found:
        _drop_idle(one)
    rewrite_bounds(found)
    return schema


def _drop_idle(schema: dict[str, Any]) -> None:
    """Drops the keywords that constrain nothing, or nothing but bounds."""
    for keyword in _IDLE:
        schema.pop(keyword, None)
    if _is_stored_as(schema):
        for keyword, bound in _STORED_AS[schema.pop("format")][1].items():
            given, nearer = schema.get(keyword, bound), max if keyword == "minimum" else min
            schema[keyword] = nearer(given, bound) if is_number(given) else given


def _is_stored_as(schema: Mapping[str, Any]) -> bool:
    given, kinds = schema.get("format"), schema.get("type")
    if not isinstance(given, str) or given not in _STORED_AS:
        return False
    return _STORED_AS[given][0] in (kinds if isinstance(kinds, list) else (kinds,))


def _require_pairs(schema: object, path: str) -> None:
    """Raises InvalidRequest for half of a surrogate pair, which nothing can encode, and no path can name."""
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeError:
        raise InvalidRequest.of(path, "has half of a surrogate pair") from None


def _check(schema: object, path: str) -> None:
    violations: list[FieldViolation] = []
    properties = values = 0
    for field, value in _values(schema, path):
        violations += _unwritable(field, value)
    for place in _places(_Place(path, 0, schema)):
        if place.depth > MAX_DEPTH:
            raise InvalidRequest.of(path, f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(place.schema, Mapping):
            violations += _violations(place.path, place.schema)
            violations += _broken_references(place, schema)
            violations += out_of_range(place.path, place.schema)
            properties += _length(place.schema.get("properties")) + _length(place.schema.get("patternProperties"))
            values += _length(place.schema.get("enum"))
        elif not isinstance(place.schema, bool):
            violations.append(FieldViolation(place.path, "must be a schema: an object, true or false"))
    for count, most, what in ((properties, MAX_PROPERTIES, "properties"), (values, MAX_ENUM_VALUES, "enum values")):
        if count > most:
            violations.append(FieldViolation(path, f"has {count} {what} of at most {most}"))
    if violations:
        raise InvalidRequest(violations[:_MAX_VIOLATIONS])


def _places(root: _Place) -> Iterator[_Place]:
    """Yields the schema and all schemas in it, down to one level more than is allowed, and once each.

    A reference may make a schema of any other place of the document.
    """
    waiting, referred = [root], list[_Place]()
    seen: set[int] = set()
    while waiting or referred:
        place = waiting.pop() if waiting else referred.pop()
        if id(place.schema) in seen:
            continue
        yield place
        if place.depth <= MAX_DEPTH and isinstance(place.schema, Mapping):
            seen.add(id(place.schema))
            waiting += reversed(list(_inner(place, place.schema)))
            referred += _referred(root, place.schema)


def _referred(root: _Place, schema: Mapping[str, Any]) -> Iterator[_Place]:
    if "$ref" not in schema:
        return
    try:
        found = find_referred(root.schema, schema["$ref"])
    except BrokenReference:  # of which `_check` tells
        return
    if found is not None:
        yield _Place(f"{root.path}{found[0]}", found[0].count("."), found[1])


def _broken_references(place: _Place, root: object) -> Iterator[FieldViolation]:
    assert isinstance(place.schema, Mapping)
    if place.schema is not root and "$id" in place.schema:
        yield FieldViolation(f"{place.path}.$id", "is supported at the root only: references would be relative to it")
    if "$ref" in place.schema:
        try:
            find_referred(root, place.schema["$ref"])
        except BrokenReference as error:
            yield FieldViolation(f"{place.path}.$ref", str(error))


def _inner(place: _Place, schema: Mapping[str, Any]) -> Iterator[_Place]:
    for keyword in _NAMED_SCHEMAS:
        if isinstance(schema.get(keyword), dict):
            for name, inner in schema[keyword].items():
                yield _Place(f"{place.path}.{keyword}.{name}", place.depth + 1, inner)
    for keyword in (*_LISTED_SCHEMAS, "items"):
        if isinstance(schema.get(keyword), list):
            for index, inner in enumerate(schema[keyword]):
                yield _Place(f"{place.path}.{keyword}[{index}]", place.depth + 1, inner)
    for keyword in _SINGLE_SCHEMAS:
        if isinstance(schema.get(keyword), dict):
            yield _Place(f"{place.path}.{keyword}", place.depth + 1, schema[keyword])


def _violations(path: str, schema: Mapping[str, Any]) -> Iterator[FieldViolation]:
    for keyword, value in schema.items():
        if keyword in UNSUPPORTED_KEYWORDS and value not in _IDLE.get(keyword, ()):
            yield FieldViolation(f"{path}.{keyword}", f"the keyword {keyword} is not supported in guided decoding")
    given = schema.get("format")
    if isinstance(given, str) and given not in FORMATS and not _is_stored_as(schema):
        text = f"the format {given!r} is not supported in guided decoding; supported are {', '.join(sorted(FORMATS))}"
        yield FieldViolation(f"{path}.format", text)
    if _may_repeat(schema):
        text = "can be one more than the names in `required`: the compiler lets other names come more than once"
        yield FieldViolation(f"{path}.minProperties", text)
    if "x-guidance" in schema:
        yield FieldViolation(f"{path}.x-guidance", "is reserved")
    for keyword in ("const", "enum"):
        if keyword in schema:
            for field, value in _values(schema[keyword], f"{path}.{keyword}"):
                if is_inexact(value):
                    yield FieldViolation(field, f"is an integer beyond {LARGEST_INTEGER}, which cannot be followed")


def _may_repeat(schema: Mapping[str, Any]) -> bool:
    """True if an object needs several names that are not required, of which the compiler would allow one repeatedly."""
    least, required = schema.get("minProperties"), schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return is_number(least) and least > len(names) + 1


def _values(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yields the value and all values in it, with their paths."""
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, dict):
            waiting += [(f"{path}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]


def _unwritable(path: str, value: object) -> Iterator[FieldViolation]:
    if isinstance(value, _Repeating):
        yield FieldViolation(f"{path}.{value.key}", "is given more than once")
    elif isinstance(value, float) and not isfinite(value):
        yield FieldViolation(path, "is not a finite number")


def _length(value: object) -> int:
    return len(value) if isinstance(value, dict | list) else 0


class BrokenReference(ValueError):
    """A `$ref` that names nothing in its document, with the reason."""


def find_referred(root: object, reference: object) -> tuple[str, object] | None:
    """Returns the path from the root, and the value there; None for an anchor, which is where schemas usually are.

    Raises BrokenReference.
    """
    if not isinstance(reference, str):
        raise BrokenReference("must be a text")
    document, _, fragment = reference.partition("#")
    identity = root.get("$id") if isinstance(root, Mapping) else None
    if document and document != (identity.partition("#")[0] if isinstance(identity, str) else None):
        raise BrokenReference("points outside of the schema; other documents are not read")
    if fragment and not fragment.startswith("/"):
        return None
    path, value = "", root
    for part in fragment.split("/")[1:]:
        step, value = _child(value, unquote(part).replace("~1", "/").replace("~0", "~"))
        path += step
    return path, value


def _child(value: Any, name: str) -> tuple[str, object]:
    if isinstance(value, Mapping) and name in value:
        return f".{name}", value[name]
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return f"[{int(name)}]", value[int(name)]
    raise BrokenReference(f"{name[:80]!r} does not exist there")
