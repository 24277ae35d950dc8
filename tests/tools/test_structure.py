"""The structure that the product keeps: names, docstrings and seams, by tools/structure.py."""

import ast
from pathlib import Path

import pytest

from tools.structure import AROUND, ROOT, Module, circles, clause_first, protocols, read, repeated_class_names


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return read(ROOT)


@pytest.fixture(scope="module")
def around() -> dict[str, Module]:
    return read(ROOT, AROUND)


def module(name: str, source: str) -> tuple[str, Module]:
    return name, Module(name, Path(f"{name}.py"), ast.parse(source), len(source.splitlines()))


def test_no_package_has_two_classes_of_one_name(product: dict[str, Module]) -> None:
    assert repeated_class_names(product) == []


def test_a_class_name_may_come_again_in_another_package_only() -> None:
    modules = dict(
        [module("one.a", "class Call: ..."), module("one.b", "class Call: ..."), module("two.a", "class Call: ...")]
    )
    assert repeated_class_names(modules) == ["one.Call"]


def test_neither_rooms_nor_files_import_each_other_in_circles(product: dict[str, Module]) -> None:
    found = [line for line in circles(product, True) if line.startswith("    ")]
    assert found == []


def test_docstrings_begin_with_their_subject(product: dict[str, Module], around: dict[str, Module]) -> None:
    assert clause_first(product | around)[1] == []


def test_a_docstring_that_begins_with_a_clause_is_found() -> None:
    modules = dict(
        [module("one.a", 'def f():\n    """Whether it is so."""\n'), module("one.b", '"""The subject."""\n')]
    )
    assert clause_first(modules) == (2, ["one.a:1 Whether it is so."])


SEAM = "class Clock(Protocol):\n    def now(self): ...\n"
CLASS = "class SystemClock:\n    def now(self): ...\n"


@pytest.mark.parametrize(
    ("implementing", "in_tests", "counts"),
    [
        (CLASS, "", "1 without a reason, 0 plugs, 0 others in tests, 0 a circle otherwise"),
        (
            CLASS,
            "class FixedClock:\n    def now(self): ...\n",
            "0 without a reason, 0 plugs, 1 others in tests, 0 a circle otherwise",
        ),
        (f"import one.user\n{CLASS}", "", "0 without a reason, 0 plugs, 0 others in tests, 1 a circle otherwise"),
        (
            f"{CLASS}class Other(SystemClock): ...\n",
            "",
            "0 without a reason, 0 plugs, 0 others in tests, 0 a circle otherwise",
        ),
    ],
)
def test_a_protocol_with_one_implementation_needs_a_reason(implementing: str, in_tests: str, counts: str) -> None:
    using = "from one.seam import Clock\n"
    product = dict([module("one.seam", SEAM), module("one.user", using), module("one.clocks", implementing)])
    others = dict([module("tests.clocks", in_tests)])
    assert list(protocols(product, others, False)) == [f"Protocols with one implementation, of 1: {counts}"]


def test_no_protocol_has_one_implementation_without_a_reason(
    product: dict[str, Module], around: dict[str, Module]
) -> None:
    others = {name: each for name, each in around.items() if name.startswith(("tests", "examples"))}
    listed = protocols(product, others, True)
    assert [each for each in listed if "(without a reason)" in each] == []
