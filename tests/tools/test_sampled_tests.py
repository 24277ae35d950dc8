"""Tests of which `make test` has a sample: each has a row in docs/decisions/tooling.md, and a case left."""

import re
from pathlib import Path

import pytest
from support.sampled import sampled

ROOT = Path(__file__).resolve().parents[2]
IMPORT = "from support.sampled import sampled"
HEADING = "## What repeats one law has a sample in `make test`"


def test_the_table_names_each_file_with_a_sample() -> None:
    text = (ROOT / "docs/decisions/tooling.md").read_text()
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(tests/\S+\.py)`", section, re.MULTILINE))
    files = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    sampling = {name for name, text in files.items() if IMPORT in text.splitlines()}
    assert sampling - {str(Path(__file__).relative_to(ROOT))} == {name for name in listed if name in sampling}
    assert all("pytest.mark.slow" in files[name] for name in listed - sampling)


def test_cases_outside_of_the_sample_are_slow_and_no_case_is_lost() -> None:
    cases = sampled(range(4), [1, 3], lambda number: f"case-{number}")
    assert [case.values for case in cases] == [(0,), (1,), (2,), (3,)]
    assert [case.id for case in cases] == ["case-0", "case-1", "case-2", "case-3"]
    assert [[mark.name for mark in case.marks] for case in cases] == [["slow"], [], ["slow"], []]


@pytest.mark.parametrize("sample", [[], [4]])
def test_a_sample_is_never_empty_and_of_known_cases(sample: list[int]) -> None:
    with pytest.raises(ValueError, match=r"not among the cases|an empty sample"):
        sampled(range(4), sample)
