"""The versions in constraints.txt."""

import json
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def required() -> list[Requirement]:
    # No TOML reader in Python 3.10; the lists of requirements are one string a line.
    project = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    project += (ROOT / "packaging" / "http2" / "pyproject.toml").read_text()
    texts = re.findall(r'^    "([A-Za-z][\w.-]*(?:[<>=!].*?)?)",$', project, re.M)
    # Ours are built from this repository, in the same version.
    return [Requirement(text) for text in texts if not text.startswith("baton-")]


def test_every_constraint_is_one_version_that_any_index_may_have() -> None:
    loose = [str(each) for each in constraints() if not re.fullmatch(r"==[\w.!]+", str(each.specifier))]
    assert loose == []


def test_every_requirement_is_pinned() -> None:
    pinned = {canonicalize_name(each.name) for each in constraints()}
    assert [each.name for each in required() if canonicalize_name(each.name) not in pinned] == []


def test_every_pin_is_one_that_the_project_accepts() -> None:
    pinned = {(canonicalize_name(each.name), str(each.specifier).removeprefix("==")) for each in constraints()}
    ranges = {canonicalize_name(each.name): each.specifier for each in required()}
    wrong = [(name, version) for name, version in pinned if name in ranges and not ranges[name].contains(version)]
    assert wrong == []


def test_torch_is_the_version_that_has_a_small_build() -> None:
    assert [str(each) for each in constraints() if each.name == "torch"] == ["torch==2.13.0"]


def test_the_proto_linters_lock_file_names_no_registry() -> None:
    lock = json.loads((ROOT / "tools" / "buf" / "package-lock.json").read_text())
    assert lock["packages"]["node_modules/@bufbuild/buf"]["version"] == "1.75.0"
    assert [name for name, package in lock["packages"].items() if "resolved" in package] == []
