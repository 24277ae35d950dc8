"""Compiles the modules that each token and each message passes, with mypyc, for wheels that are built with this hook.

`make wheel COMPILED=1` enables it; pyproject.toml names the modules, and packaging/http2/pyproject.toml those of the
HTTP/2. In the wheel each lies beside its source, and is imported in its place. Nothing is written into the checkout,
where a compiled module would hide later changes.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup

folder, group, *modules = sys.argv[1:]
extensions = mypycify(modules, opt_level="2", debug_level="0", target_dir=folder + "/c", group_name=group)
arguments = ["build_ext", "--quiet", "--build-lib", folder + "/lib", "--build-temp", folder + "/objects"]
setup(name="compiled", packages=[], py_modules=[], ext_modules=extensions, script_args=arguments)
"""


class Compiled:
    """Compiled modules in a temporary folder. `group` names the file that they share; modules are paths below `root`.

    mypy reads the types of the whole project for this, so that its dependencies must be installed, and the stubs made.
    """

    def __init__(self, root: str, group: str, modules: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-c", _BUILD, self._folder.name, group, *modules]
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"mypyc: {done.stdout[-4000:]}")

    def add_to(self, build_data: dict[str, Any]) -> None:
        """Adds the modules to a wheel, whose tag then names the platform and the version of Python."""
        compiled = Path(self._folder.name) / "lib"
        for path in compiled.rglob("*.so"):
            build_data["force_include"][str(path)] = str(path.relative_to(compiled))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def cleanup(self) -> None:
        """Removes the folder, once the wheel is written."""
        self._folder.cleanup()


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the modules that pyproject.toml names."""

    _compiled: Compiled | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._compiled = Compiled(self.root, "baton", self.config["modules"])
        self._compiled.add_to(build_data)

    def finalize(self, *_: Any) -> None:
        if self._compiled is not None:
            self._compiled.cleanup()
