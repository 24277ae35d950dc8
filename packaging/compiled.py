"""Compiles the modules that each token and each message passes, with mypyc, for wheels that are built with this hook.

`make wheel COMPILED=1` enables it; pyproject.toml names the modules. In the wheel each lies beside its source, and is
imported in its place. Nothing is written into the checkout, where a compiled module would hide later changes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup

folder, *modules = sys.argv[1:]
extensions = mypycify(modules, opt_level="2", debug_level="0", target_dir=folder + "/c", group_name="baton")
arguments = ["build_ext", "--quiet", "--build-lib", folder + "/lib", "--build-temp", folder + "/objects"]
setup(name="compiled", packages=[], py_modules=[], ext_modules=extensions, script_args=arguments)
"""


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled modules to a wheel, whose tag then names the platform and the version of Python.

    mypy reads the types of the whole project for this, so that its dependencies must be installed, and the stubs made.
    """

    _folder: "tempfile.TemporaryDirectory[str] | None" = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-c", _BUILD, self._folder.name, *self.config["modules"]]
        done = subprocess.run(command, cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"mypyc: {done.stdout[-4000:]}")
        compiled = Path(self._folder.name) / "lib"
        for path in compiled.rglob("*.so"):
            build_data["force_include"][str(path)] = str(path.relative_to(compiled))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, *_: Any) -> None:
        if self._folder is not None:
            self._folder.cleanup()
