"""docs/extending.md names files that exist, with about as many lines as it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
ROWS = re.findall(r"^\| ((?:`[\w/.]+`(?:, )?)+) \| (\d+) \|", PAGE, re.M)


def test_the_page_has_files_with_their_lines() -> None:
    assert len(ROWS) >= 8


@pytest.mark.parametrize(("names", "lines"), ROWS)
def test_the_files_are_as_long_as_the_page_says(names: str, lines: str) -> None:
    found = sum(len((ROOT / name).read_text().splitlines()) for name in re.findall(r"`([\w/.]+)`", names))
    assert 0.7 * found <= int(lines) <= 1.4 * found, found
