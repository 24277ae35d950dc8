"""Adds the package baton_http2 to the distribution baton-http2, and compiles a part of it where that is asked for."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
PACKAGE = "baton_http2"
# An sdist has the package beside this file; a checkout has it at its root.
IN_SDIST = HERE / PACKAGE


class Http2Hook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles nothing in an editable installation, nor from an sdist."""

    _compiled: Any = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        build_data["force_include"][str(IN_SDIST if IN_SDIST.is_dir() else CHECKOUT / PACKAGE)] = PACKAGE
        # hatch's own switch for the hook of baton-serving: both wheels are compiled, or none.
        if self.target_name == "wheel" and os.environ.get("HATCH_BUILD_HOOK_ENABLE_CUSTOM") == "true":
            self._compiled = _compiler().Compiled(str(CHECKOUT), PACKAGE, self.config["modules"])
            self._compiled.add_to(build_data)

    def finalize(self, *_: Any) -> None:
        if self._compiled is not None:
            self._compiled.cleanup()


def _compiler() -> Any:
    """The module packaging/compiled.py of the checkout."""
    spec = importlib.util.spec_from_file_location("compiled", CHECKOUT / "packaging" / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
