"""CI reruns a test once if its process crashed, and never one that failed."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each test leaves a file at its first run.
SUITE = """
import os, pathlib

def is_first(name):
    mark = pathlib.Path(__file__).with_name(name)
    first = not mark.exists()
    mark.touch()
    return first

def test_fails_at_first():
    assert not is_first("fails"), "worker 'gw0' crashed while running 'a test'"

def test_crashes_at_first():
    if is_first("crashes"):
        os.abort()

def test_crashes_every_time():
    os.abort()

def test_passes():
    pass
"""


def options_of_ci() -> list[str]:
    """The options that `make test` adds to pytest in CI."""
    # Not as a part of the `make test` that may be running these tests.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "test", "CI=true", "JOBS=2", "TESTS=SUITE"]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=True)
    [line] = [line for line in shown.stdout.splitlines() if "-m pytest" in line]
    words = shlex.split(line)
    return words[words.index("pytest") + 1 : words.index("SUITE")]


@pytest.mark.slow
def test_a_crash_is_run_again_once_and_a_failure_never(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options_of_ci(), "."],
        cwd=tmp_path,
        capture_output=True,
        timeout=100,
    )
    lines = ran.stdout.decode().splitlines()
    outcomes = {tuple(line.split()[:2]) for line in lines if line.startswith(("RERUN ", "FAILED ", "PASSED "))}
    assert outcomes == {
        ("FAILED", "test_suite.py::test_fails_at_first"),
        ("RERUN", "test_suite.py::test_crashes_at_first"),
        ("PASSED", "test_suite.py::test_crashes_at_first"),
        ("RERUN", "test_suite.py::test_crashes_every_time"),
        ("FAILED", "test_suite.py::test_crashes_every_time"),
    }
    assert "2 failed, 2 passed, 2 rerun" in lines[-1]
