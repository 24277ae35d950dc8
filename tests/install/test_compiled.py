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
