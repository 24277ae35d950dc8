"""The time of importing the client library."""

import subprocess
import sys
from pathlib import Path

from support.calibration import here
from support.cluster.processes import ROOT

PROGRAM = "import time; from baton import Client, AsyncClient; print(time.process_time())"
IMPORT_SECONDS = 0.3


def test_the_client_is_imported_in_a_moment(tmp_path: Path) -> None:
    # Of that process's own time, and the best of three: the machine may be busy.
    assert min(seconds(tmp_path) for _ in range(3)) < here(IMPORT_SECONDS)


def seconds(folder: Path) -> float:
    command, environment = [sys.executable, "-c", PROGRAM], {"PYTHONPATH": str(ROOT)}
    return float(
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60, check=True).stdout
    )
