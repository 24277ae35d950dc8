"""Processes whose packages are on the path but not installed, as in a copied folder."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A folder with everything that is installed but Baton itself."""
    folder = tmp_path / "others"
    folder.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if not installed.name.startswith("baton_serving") and installed.suffix != ".pth":
            (folder / installed.name).symlink_to(installed)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "router", str(ROOT / "deploy/config/router.yaml"), "--print-config"),
        ("-m", "services", str(ROOT / "deploy/config/prefill.yaml"), "--print-config"),
        ("-m", "cli", "--version"),
        ("-c", "import runtime.telemetry.metrics, rpc.tracing.tracer as t; t._resource('router', '')"),
    ],
    ids=["router", "worker", "command", "metrics and spans"],
)
def test_a_process_runs_where_the_package_is_not_installed(others: Path, words: tuple[str, ...]) -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "protos", others)))
    # Without site, which would find what is installed after all.
    command = [sys.executable, "-S", *words]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
