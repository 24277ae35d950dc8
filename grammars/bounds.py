"""Bounds of numbers in JSON Schemas, rewritten where the grammar compiler would follow them wrongly."""

from collections.abc import Iterator, Mapping, Sequence
from math import floor, nextafter
from typing import Any, TypeGuard

from baton.errors import FieldViolation

LARGEST_INTEGER = 2**53 - 1
"""The compiler computes with 64-bit floating-point numbers, which are exact up to here."""

_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_CLOSEST_TO_ZERO = 1e-15


def is_inexact(value: object) -> bool:
    """True if it is an integer that the compiler would round."""
    return isinstance(value, int) and abs(value) > LARGEST_INTEGER


def out_of_range(path: str, schema: Mapping[str, Any]) -> Iterator[FieldViolation]:
    """Yields the bounds that leave only integers which the compiler would round."""
    for keyword in (*_LOWER, *_UPPER, "multipleOf"):
        value = schema.get(keyword)
        if not is_number(value):
            continue
        beyond = abs(value) if keyword == "multipleOf" else value if keyword in _LOWER else -value
        if beyond > LARGEST_INTEGER:
            yield FieldViolation(f"{path}.{keyword}", f"is a number beyond {LARGEST_INTEGER}, which cannot be followed")


def rewrite_bounds(schemas: Sequence[dict[str, Any]]) -> None:
    """Rewrites the bounds in all subschemas of a schema, so that answers within the new bounds are within the old."""
    for schema in schemas:
        _read_draft_4(schema)
        _narrow(schema)
    lower, upper = _bounds(schemas, _LOWER), _bounds(schemas, _UPPER)
    for schema in schemas:
        _avoid_excluded_integers(schema, lower, upper)


def _read_draft_4(schema: dict[str, Any]) -> None:
    """In draft 4 `exclusiveMinimum` is true or false, and says whether `minimum` itself is excluded."""
    for inclusive, exclusive in (_LOWER, _UPPER):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and inclusive in schema:
            schema[exclusive] = schema.pop(inclusive)


def _narrow(schema: dict[str, Any]) -> None:
    """Bounds that are beyond the exact integers on their far side, such as those of 64-bit integers."""
    for keyword in (*_LOWER, *_UPPER):
        value = schema.get(keyword)
        if is_number(value) and abs(value) > LARGEST_INTEGER:
            schema[keyword] = -LARGEST_INTEGER if keyword in _LOWER else LARGEST_INTEGER


def _bounds(schemas: Sequence[Mapping[str, Any]], keywords: Sequence[str]) -> list[float]:
    values = (schema.get(keyword) for schema in schemas for keyword in keywords)
    return [value for value in values if is_number(value)]


def _avoid_excluded_integers(schema: dict[str, Any], lower: Sequence[float], upper: Sequence[float]) -> None:
    """The compiler allows an excluded integer if the other bound is less than 1 away.

    `lower` and `upper` are of all subschemas, since those of references and of `allOf` are joined.
    """
    excluded = _integer(schema.get("exclusiveMinimum"))
    near = [one for one in upper if excluded is not None and excluded >= 0 and 0 < one - excluded < 1]
    if excluded is not None and near:
        del schema["exclusiveMinimum"]
        schema["minimum"] = max(schema.get("minimum", excluded), _beside(excluded, min(near)))
    excluded = _integer(schema.get("exclusiveMaximum"))
    near = [one for one in lower if excluded is not None and excluded <= 0 and 0 < excluded - one < 1]
    if excluded is not None and near:
        del schema["exclusiveMaximum"]
        schema["maximum"] = min(schema.get("maximum", excluded), _beside(excluded, max(near)))


def _integer(value: object) -> int | None:
    """A bound that is an integer, such as 1 and 1.0; None for others."""
    return int(value) if is_number(value) and value == floor(value) else None


def _beside(excluded: int, other: float) -> float:
    """A bound next to an integer, in the direction of another bound."""
    if excluded:
        return nextafter(excluded, other)
    return min(_CLOSEST_TO_ZERO, other / 1000) if other > 0 else max(-_CLOSEST_TO_ZERO, other / 1000)


def is_number(value: object) -> TypeGuard[int | float]:
    """True for numbers of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)
