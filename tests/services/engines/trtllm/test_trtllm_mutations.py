"""tools/mutations/trtllm.yaml matches the tree: each guard is in its file, and each test exists."""

import re
from pathlib import Path

import pytest

from tools.mutate import ROOT, Mutation, mutated, read

MUTATIONS = read(ROOT / "tools" / "mutations" / "trtllm.yaml")


def test_each_of_the_27_guards_is_taken_away_at_least_once() -> None:
    assert {one.guard for one in MUTATIONS} == set(range(1, 28))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.guard} {one.removes}")
def test_a_guard_is_where_it_is_said_to_be(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text()
    without = mutated(mutation, text)
    assert without != text
    compile(without, mutation.path, "exec")


@pytest.mark.parametrize("test_id", sorted({one.test_id for one in MUTATIONS}))
def test_its_test_exists(test_id: str) -> None:
    path, _, name = test_id.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_every_guard_is_in_the_table_of_the_documentation() -> None:
    table = Path(ROOT / "docs" / "tensorrt-llm.md").read_text()
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == set(range(1, 28))
