"""Adds the package baton, with its generated stubs, to the distribution baton-client."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
# An sdist has the package, with its stubs, beside this file; a checkout has it at its root.
IN_SDIST = HERE / "baton"

# As the extra `dev` of baton-serving has them.
GENERATORS = ["grpcio-tools==1.81.1", "mypy-protobuf>=3.7"]


class ClientHook(BuildHookInterface):  # type: ignore[type-arg]
    """Generates the stubs where they are missing or outdated. For an editable installation, `make protos` does that."""

    def dependencies(self) -> list[str]:
        return [] if IN_SDIST.is_dir() or _stubs().are_current() else GENERATORS

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        package = IN_SDIST
        if not package.is_dir():
            package = CHECKOUT / "baton"
            stubs = _stubs()
            if not stubs.are_current():
                stubs.main()
        build_data["force_include"][str(package)] = "baton"


def _stubs() -> Any:
    """The module tools/stubs.py of the checkout."""
    spec = importlib.util.spec_from_file_location("stubs", CHECKOUT / "tools" / "stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
