"""The modules that `make wheel COMPILED=1` compiles, as far as it is known without compiling; see `make compiled`."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def modules() -> list[str]:
    # No TOML reader in Python 3.10; the list has a path in each line.
    serving = (ROOT / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.wheel.hooks.custom]")[2]
    http2 = (ROOT / "packaging/http2/pyproject.toml").read_text().partition("[tool.hatch.build.hooks.custom]")[2]
    return [
        path
        for hook in (serving, http2)
        for path in re.findall(r'^    "([\w/]+\.py)",$', hook.partition("\n]\n")[0], re.M)
    ]


def coroutines(path: str) -> list[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return [f"{path}: {node.name}" for node in nodes if isinstance(node, ast.AsyncFunctionDef)]


def test_every_module_that_is_compiled_exists() -> None:
    assert len(modules()) > 20
    assert [path for path in modules() if not (ROOT / path).is_file()] == []


def test_nothing_that_is_compiled_is_a_coroutine() -> None:
    """mypyc has no asynchronous generators, and its coroutines share the exception that they handle with all tasks."""
    assert [found for path in modules() for found in coroutines(path)] == []


def test_a_checkout_has_no_compiled_modules() -> None:
    """They would be imported instead of their sources, however these have changed."""
    assert [path for path in modules() if list((ROOT / path).parent.glob(f"{Path(path).stem}.*.so"))] == []


def attributes(path: str) -> tuple[set[str], set[str]]:
    """The attributes of a module's classes, and those of them that can be deleted where it is compiled."""
    own: set[str] = set()
    deletable: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            own.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
            if node.target.id == "__deletable__" and node.value is not None:
                deletable.update(ast.literal_eval(node.value))
    return own, deletable


def deleted(path: Path) -> list[tuple[str, str]]:
    """The attributes that a module deletes, and where."""
    nodes = ast.walk(ast.parse(path.read_text()))
    targets = [target for node in nodes if isinstance(node, ast.Delete) for target in node.targets]
    return [(one.attr, f"{path.relative_to(ROOT)}:{one.lineno}") for one in targets if isinstance(one, ast.Attribute)]


def test_every_attribute_that_is_deleted_can_be_where_its_class_is_compiled() -> None:
    own, deletable = (set().union(*names) for names in zip(*map(attributes, modules()), strict=True))
    packages = ("baton_http2", "engine_protocol", "router", "rpc", "runtime")
    places = [found for package in packages for path in (ROOT / package).rglob("*.py") for found in deleted(path)]
    assert places
    assert [where for attribute, where in places if attribute in own - deletable] == []
