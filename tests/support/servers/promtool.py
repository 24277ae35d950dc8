"""Prometheus and its promtool, of the Debian package `prometheus`."""

import os
import shutil
import subprocess

import pytest


def require(program: str) -> str:
    """The program's path. Skips the test without it, or fails where it must be there."""
    found = shutil.which(program)
    if found is None:
        reason = f"{program} was not found: tools/install_system_packages.sh installs it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def promtool(*arguments: str, stdin: str = "") -> str:
    """The output of promtool. Raises AssertionError if it fails."""
    command = [require("promtool"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
