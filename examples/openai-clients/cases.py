"""Cases of a library: functions that return a line of text each, and the schemas that all libraries are asked for."""

import os
import sys
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel

URL = os.environ.get("BATON_OPENAI", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("BATON_TOKEN", "any")
MODEL = os.environ.get("BATON_MODEL", "demo")
PROMPT = "Sort: pear apple mango"
QUESTION = "The weather in Oslo?"
MOST_TOKENS = 200


class Pet(BaseModel):
    """The object that the structured outputs are."""

    name: Literal["Rex", "Tom"]
    kind: Literal["cat", "dog"]


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def called(name: str, city: object, answer: object) -> str:
    """The line of a call, and of the answer after its result: a small model says anything, but it says it as text."""
    known = "known" if city in ("Oslo", "Rome") else f"unknown: {city!r}"
    return f"{name}, city {known}, then {'a text' if isinstance(answer, str) else repr(answer)}"


def pet(made: Pet) -> str:
    """The line of a structured output."""
    return f"{type(made).__name__} {made.name in ('Rex', 'Tom')} {made.kind in ('cat', 'dog')}"


def run(*cases: Callable[[], str]) -> None:
    """Prints the line of each case. Ends the program with 1 after a case that failed."""
    failed = False
    for case in cases:
        try:
            print(f"{case.__name__}: {case()}", flush=True)
        except Exception as error:
            failed = True
            print(f"{case.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(failed)
