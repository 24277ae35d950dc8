"""Tests wait for a process that starts for as long as it gets on."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from support.cluster.progress import Progress
from support.eventually import eventually


@contextmanager
def running(program: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


async def test_a_process_that_computes_gets_on() -> None:
    with running("while True: pass") as process:
        progress = Progress(process.pid, stalled_seconds=2.0)
        ends_at = time.monotonic() + 4.0
        while time.monotonic() < ends_at:
            assert not progress.has_stalled()


async def test_a_process_whose_child_computes_gets_on() -> None:
    busy = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    with running(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])") as process:
        progress = Progress(process.pid, stalled_seconds=2.0)
        ends_at = time.monotonic() + 4.0
        while time.monotonic() < ends_at:
            assert not progress.has_stalled()


async def test_a_process_that_hangs_has_stalled() -> None:
    with running("while True: pass") as process:
        process.send_signal(signal.SIGSTOP)
        progress = Progress(process.pid, stalled_seconds=0.5)
        await eventually(progress.has_stalled)


async def test_a_process_that_never_comes_to_an_end_is_given_up() -> None:
    with running("while True: pass") as process:
        progress = Progress(process.pid, longest_seconds=0.5)
        await eventually(progress.has_stalled)
