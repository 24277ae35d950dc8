"""No regular expression over a client's bytes takes more than linear time: `re` would block every stream."""

import importlib
import itertools
import pkgutil
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support.growth import growth

import devtools.trace_viewer
import discovery
import media
import router
import rpc

if sys.version_info >= (3, 11):
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_parse as parser

# Small steps first: an exponential pattern is found out before it takes hours. Then doubling.
REPETITIONS = (*range(2, 34, 2), 64, 128, 256, 512, 1024, 2048, 4096)
# From 2 ms on, with room for noise. A quadratic pattern takes seconds for the longest input.
MOST_GROWTH = 32
# Everything else is only ever matched from the start of what it looks at.
SEARCHED = {"media.sources.uri._AMBIGUOUS", "media.content._MARKER", "devtools.trace_viewer.api._DURATION"}

Pattern = re.Pattern[Any]


def patterns() -> Iterator[tuple[str, Pattern]]:
    """All compiled patterns of the packages that read what clients send, by their names."""
    for package in (router, media, rpc, devtools.trace_viewer, discovery):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not info.name.endswith("__main__"):
                yield from patterns_of(importlib.import_module(info.name))


def patterns_of(module: ModuleType) -> Iterator[tuple[str, Pattern]]:
    for name, value in vars(module).items():
        for pattern in leaves(value):
            yield f"{module.__name__}.{name}", pattern


def leaves(value: object) -> Iterator[Pattern]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from leaves(inner)


def words(pattern: Pattern) -> set[str]:
    """The pattern's literal parts, and a character of each of its classes."""
    found: set[str] = set()
    collect(parser.parse(pattern.pattern, pattern.flags), found)
    return {word for word in found if word} | {" ", "a", "1"}


def collect(parsed: Any, found: set[str]) -> None:
    literal = ""
    for operator, argument in parsed:
        if str(operator) == "LITERAL":
            literal += chr(argument)
            continue
        found.add(literal)
        literal = ""
        for inner in inner_patterns(argument):
            collect(inner, found)
    found.add(literal)


def inner_patterns(argument: Any) -> Iterator[Any]:
    if isinstance(argument, parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for one in argument:
            yield from inner_patterns(one)


def attacks(pattern: Pattern) -> Iterator[tuple[Any, Any]]:
    """A start and what is repeated behind it: every word, and every two of them, behind nothing or a word."""
    known = sorted(words(pattern))
    repeated = [*known, *("".join(two) for two in itertools.permutations(known, 2))]
    for start, pump in itertools.product(["", *known], repeated):
        yield (start.encode("latin-1"), pump.encode("latin-1")) if isinstance(pattern.pattern, bytes) else (start, pump)


def test_patterns_are_found_where_they_stand_also_inside_tables() -> None:
    names = [name for name, _ in patterns()]
    assert names.count("media.content._OTHERS") > 10
    assert {"rpc.auth.caller._URI", "discovery.registry._NAME", *SEARCHED} <= set(names)


@pytest.mark.parametrize(("name", "pattern"), [pytest.param(*each, id=f"{each[0]}") for each in patterns()])
def test_a_pattern_takes_linear_time_on_what_it_almost_matches(name: str, pattern: Pattern) -> None:
    methods = [pattern.match, pattern.fullmatch, *([pattern.search] if name in SEARCHED else [])]
    end = b"\x01" if isinstance(pattern.pattern, bytes) else "\x01"
    for method, (start, pump) in itertools.product(methods, attacks(pattern)):
        grown = growth(method, [start + pump * count + end for count in REPETITIONS])
        assert grown < MOST_GROWTH, f"{start!r} and many {pump!r}: {grown:.0f} times"
