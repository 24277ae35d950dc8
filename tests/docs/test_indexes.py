"""The indexes that readers start from: the list of decisions, and the map in each package's docstring."""

import ast
import re
from pathlib import Path

import pytest

from tools.structure import GENERATED, PACKAGES

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("tools", "benchmarks")
ROOMS = sorted(path.parent for package in (*PACKAGES, *OTHERS) for path in (ROOT / package).rglob("__init__.py"))


def test_every_decision_is_in_the_index_under_its_page() -> None:
    index = (ROOT / "docs" / "decisions.md").read_text()
    pages = re.findall(r"^## \[.*?\]\((.*?)\)$", index, re.M)
    headings = [(heading, page) for page in pages for heading in re.findall(r"^## (.*)$", read(page), re.M)]
    assert re.findall(r"^\* \[(.*)\]\((.*?)#", index, re.M) == headings
    assert {f"decisions/{path.name}" for path in (ROOT / "docs" / "decisions").glob("*.md")} == set(pages)


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_every_module_is_in_the_map_of_its_package(room: Path) -> None:
    shown = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    written = [path for path in room.glob("*.py") if not GENERATED.search(path.name)]
    modules = {path.stem for path in written if not path.stem.startswith("__")}
    assert {name for name in modules if not re.search(rf"\b{name}\b", shown)} == set()
