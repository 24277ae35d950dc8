"""Ends vLLM's processes when the process that started them is killed: they would run on, with their memory, for ever.

A small process of its own waits for the end of a pipe that only the worker's process holds open. Then it kills every
process whose environment has this worker's mark: children inherit it, however deep. It uses the standard library only.
After an orderly end there are none.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "BATON_VLLM_OF"
# Processes may be starting while the others are killed.
_LOOKS = 10
_LOOK_SECONDS = 0.2
_END_SECONDS = 5.0


class OrphanWatch:
    """A context manager: enter it before vLLM is started; leaving it ends those of its processes that are left."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)

    def __enter__(self) -> "OrphanWatch":
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._watch = subprocess.Popen(
            [sys.executable, "-S", __file__, self._mark],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        os.environ[MARK] = self._mark
        return self

    def started(self) -> None:
        """Takes the mark out of this process's environment, once vLLM's processes have it."""
        if os.environ.get(MARK) == self._mark:
            del os.environ[MARK]

    def __exit__(self, *exception: object) -> None:
        self.started()
        assert self._watch.stdin is not None
        self._watch.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._watch.wait(_END_SECONDS)


def marked(mark: str) -> list[int]:
    """Returns the processes that were started with this mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def wait(mark: str) -> None:
    """Waits for the end of standard input; then kills the marked processes until there are none."""
    sys.stdin.buffer.read()
    for _ in range(_LOOKS):
        found = marked(mark)
        if not found:
            return
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    wait(sys.argv[1])
