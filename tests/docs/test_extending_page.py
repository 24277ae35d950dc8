"""docs/extending.md names files that exist, and no numbers of lines, which nothing would keep true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = sorted(set(re.findall(r"`((?:[a-z_]+/)+[\w.]+\.(?:py|md|proto))`", PAGE)))


def test_the_page_names_files() -> None:
    assert len(FILES) >= 20


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_it_has_no_numbers_of_lines() -> None:
    assert re.findall(r"\d+ lines", PAGE) == []
