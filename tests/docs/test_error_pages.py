"""docs/errors.md has a section for every reason, and none for another."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import errors
from baton.errors import BatonError
from rpc.status import code_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=\n## |\Z)", PAGE, re.M | re.S))


def kinds() -> Iterator[type[BatonError]]:
    for each in vars(errors).values():
        if isinstance(each, type) and issubclass(each, BatonError):
            yield each


def test_every_reason_has_a_section_and_every_section_a_reason() -> None:
    assert set(SECTIONS) == {kind.reason for kind in kinds()}


def test_no_section_comes_twice() -> None:
    assert len(re.findall(r"^## ", PAGE, re.M)) == len(SECTIONS)


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.reason)
def test_a_section_begins_with_the_status_code_of_its_error(kind: type[BatonError]) -> None:
    assert SECTIONS[kind.reason].startswith(f"`{code_of(kind).name}`")


@pytest.mark.parametrize("reason", list(SECTIONS))
def test_a_section_says_more_than_the_code(reason: str) -> None:
    assert len(SECTIONS[reason].split()) > 20
