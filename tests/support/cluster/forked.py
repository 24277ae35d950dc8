"""A router that is forked from a process which has imported it: a process as any other, but its start takes little."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from router.__main__ import main

_context = multiprocessing.get_context("forkserver")
# The main module, too: each process would import it again.
_context.set_forkserver_preload(["__main__", "router.server", "support.cluster.forked"])


class ForkedRouter:
    """Runs a router with these overrides. The part of subprocess.Popen that a Node needs."""

    def __init__(self, overrides: Sequence[str], log: Path) -> None:
        self._process = _context.Process(target=_run, args=(tuple(overrides), log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Waits for its end. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("router", timeout)
        return self._process.exitcode


def _run(overrides: Sequence[str], log: Path) -> None:
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["router", *overrides]
    main()
