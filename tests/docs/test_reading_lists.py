"""The lists of what to read before a change (tools/reading_lists.yaml) name files that exist."""

import ast

import yaml

from tools.structure import ROOT

LISTS: dict[str, list[str]] = yaml.safe_load((ROOT / "tools" / "reading_lists.yaml").read_text())
LANE = ("TokenSink", "TokenSource", "Wire", "ClientLane", "TokenMeter", "Generation", "UnsentAnswer")


def test_each_file_of_a_reading_list_exists_once() -> None:
    for purpose, names in LISTS.items():
        assert len(set(names)) == len(names), purpose
        assert [name for name in names if not (ROOT / name).is_file()] == [], purpose


def test_the_list_of_a_token_has_every_file_that_imports_two_of_the_lane_s_names() -> None:
    for path in (each for room in ("router", "engine_protocol", "services") for each in (ROOT / room).rglob("*.py")):
        text = path.read_text()
        if sum(name in text for name in LANE) > 1 and len(_joined(text)) > 1:
            assert path.relative_to(ROOT).as_posix() in LISTS["a token's path"]


def _joined(source: str) -> set[str]:
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imported for alias in node.names if alias.name in LANE}
