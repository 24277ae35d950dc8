"""Stops processes as a machine does that stands still: their connections stay open, and nothing answers."""

import os
import signal
import time
from pathlib import Path

_PATIENCE_SECONDS = 60.0


def freeze(pid: int) -> None:
    """Stops all threads of a process; they do nothing more when this returns. SIGCONT lets them go on."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all(_state(thread) in "TtZX" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return "X"
