"""Tests the compiled modules (`make compiled`): builds and installs the wheels in a temporary folder, runs tests there.

    python -m tools.compiled [PATH OF TESTS ...]

First every module that pyproject.toml names for compilation is imported, and must come from a file of machine code.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
HTTP2 = ROOT / "packaging" / "http2"
TESTS = (
    "tests/http2",
    "tests/rpc",
    "tests/router/stream",
    "tests/router/text",
    "tests/router/telemetry",
    "tests/router/routing",
)
MORE_TESTS = ("tests/router/test_generate.py", "tests/router/test_cancellation.py", "tests/e2e/test_answers.py")
_IMPORT_ALL = """
import importlib, sys
pure = [name for name in sys.argv[1:] if not importlib.import_module(name).__file__.endswith((".so", ".pyd"))]
sys.exit(f"not compiled: {' '.join(pure)}" if pure else 0)
"""


def main() -> int:
    """The exit status of the tests."""
    with tempfile.TemporaryDirectory() as name:
        installed = Path(name) / "installed"
        install(Path(name) / "wheels", installed)
        (installed / "models").symlink_to(ROOT / "models")  # deploy/config names the demo model from here
        # In that folder, and with it before all others on the path, so that processes of the tests find it too.
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        subprocess.run([sys.executable, "-c", _IMPORT_ALL, *modules()], cwd=installed, env=environment, check=True)
        tests = [str(ROOT / path) for path in sys.argv[1:] or (*TESTS, *MORE_TESTS)]
        options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-n", "0"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests], cwd=installed, env=environment, check=False
        ).returncode


def modules() -> list[str]:
    """The modules that are compiled, as they are imported."""
    http2 = _build(HTTP2)["hooks"]["custom"]["modules"]
    paths: list[str] = [*_build(ROOT)["targets"]["wheel"]["hooks"]["custom"]["modules"], *http2]
    return [path.removesuffix(".py").replace("/", ".") for path in paths]


def packages() -> list[str]:
    """The folders that the wheel has."""
    found: list[str] = [*_build(ROOT)["targets"]["wheel"]["packages"], "baton_http2"]
    return found


def _build(folder: Path) -> dict[str, Any]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    build: dict[str, Any] = project["tool"]["hatch"]["build"]
    return build


def install(wheels: Path, folder: Path) -> None:
    """Builds the three wheels, two of them with compiled modules, and installs them into `folder`."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
    subprocess.run(build, cwd=ROOT / "packaging" / "client", check=True)
    for project in (HTTP2, ROOT):
        subprocess.run(build, cwd=project, env={**os.environ, "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}, check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, *map(str, wheels.glob("*.whl"))], check=True)


if __name__ == "__main__":
    sys.exit(main())
