"""Starts and stops the supervisor of a local cluster from a command in the foreground."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator

from baton.errors import ConfigError
from cli.local.plan import ROOT, ClusterOptions
from cli.local.readiness import StartFailed
from cli.local.state import AlreadyRunning, StateFolder
from cli.local.supervisor import EXIT_ALREADY_RUNNING, EXIT_CONFIG
from runtime.aio import timeout

# For a live supervisor that does not own the folder yet: only a very busy machine needs this long.
START_SECONDS = 60.0
# Longer than a supervisor needs: two rounds of its own STOP_SECONDS.
STOP_SECONDS = 25.0
KILL_SECONDS = 15.0
POLL_SECONDS = 0.05


async def start(folder: StateFolder, options: ClusterOptions) -> None:
    """Starts a supervisor in its own session, and returns when it owns the folder. Raises StartFailed.

    Cancelling this function stops the supervisor too, because `stop` cannot find it before it owns the folder.
    """
    process = _spawn(folder, options)
    try:
        async with timeout(START_SECONDS):
            while folder.read() is None:
                _raise_if_failed(process.poll(), folder)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        _end(process)
        raise StartFailed(f"the supervisor did not start within {START_SECONDS:g} s", "supervisor") from None
    except asyncio.CancelledError:
        _end(process)
        raise


def _spawn(folder: StateFolder, options: ClusterOptions) -> "subprocess.Popen[bytes]":
    folder.logs.mkdir(parents=True, exist_ok=True)
    with folder.log("supervisor").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cli.local.supervisor", str(folder.path), options.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stops the supervisor and all its processes. Blocks, so that it cannot be interrupted."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _raise_if_failed(exit_code: int | None, folder: StateFolder) -> None:
    # Another supervisor was faster: wait for that one.
    if exit_code in (None, EXIT_ALREADY_RUNNING):
        return
    said = folder.log("supervisor").read_text().strip()
    if exit_code == EXIT_CONFIG:
        raise ConfigError(said)
    raise StartFailed(f"the supervisor exited: {said}", "supervisor")


async def stop(folder: StateFolder) -> bool:
    """Stops the cluster and all its processes; returns whether there was one. Leaves only logs.

    When it returns, the supervisor and its processes have exited, not only released the lock.
    """
    running = folder.has_supervisor
    if running and not await _ended_after(folder, signal.SIGTERM, STOP_SECONDS):
        await _ended_after(folder, signal.SIGKILL, KILL_SECONDS)
    # Removes the files of a supervisor that was killed.
    with contextlib.suppress(AlreadyRunning), folder.cleaned():
        pass
    return running


async def _ended_after(folder: StateFolder, number: signal.Signals, seconds: float) -> bool:
    """Sends the signal as soon as the supervisor's id is known; returns whether all exited within `seconds`."""
    with contextlib.ExitStack() as stack:
        processes: _Processes | None = None
        try:
            async with timeout(seconds):
                while folder.has_supervisor or (processes and processes.any_alive()):
                    pid = folder.supervisor_pid()
                    if pid is not None and processes is None:
                        processes = stack.enter_context(_processes([pid, *_children(folder)]))
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            return False
    return True


def _children(folder: StateFolder) -> list[int]:
    state = folder.read()
    return [each.pid for each in state.processes if each.pid] if state else []


class _Processes:
    """Processes held by pidfd, which never refers to a later process of the same id."""

    def __init__(self, descriptors: list[int]) -> None:
        self._count = len(descriptors)
        self._ended = select.poll()  # select() takes no descriptors from 1,024 on
        for descriptor in descriptors:
            self._ended.register(descriptor, select.POLLIN)

    def any_alive(self) -> bool:
        """True if any of them is still alive."""
        return len(self._ended.poll(0)) < self._count


@contextlib.contextmanager
def _processes(pids: Iterable[int]) -> Iterator[_Processes]:
    """The processes that are alive now; empty on systems without pidfd."""
    descriptors: list[int] = []
    try:
        if sys.platform == "linux":
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    descriptors.append(os.pidfd_open(pid))
        yield _Processes(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
