"""Starting and ending the supervisor of a local cluster, from a command in the foreground."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

from client.local.plan import ROOT, ClusterOptions
from client.local.readiness import StartFailed
from client.local.state import AlreadyRunning, StateFolder
from client.local.supervisor import EXIT_ALREADY_RUNNING, EXIT_CONFIG
from rpc.aio import timeout
from rpc.errors import ConfigError

START_SECONDS = 15.0
# Longer than a supervisor needs: two rounds of STOP_SECONDS.
STOP_SECONDS = 25.0
POLL_SECONDS = 0.05


async def start(folder: StateFolder, options: ClusterOptions) -> None:
    """Starts a supervisor in a session of its own, and returns when it has the folder. Raises StartFailed.

    Whoever interrupts that interrupts the supervisor too: before it has the folder, `stop` would not find it.
    """
    process = _spawn(folder, options)
    try:
        async with timeout(START_SECONDS):
            while folder.read() is None:
                _raise_if_failed(process.poll(), folder)
                await asyncio.sleep(POLL_SECONDS)
    except asyncio.TimeoutError:
        _end(process)
        raise StartFailed(f"the supervisor did not start within {START_SECONDS:g} s", "supervisor") from None
    except asyncio.CancelledError:
        _end(process)
        raise


def _spawn(folder: StateFolder, options: ClusterOptions) -> "subprocess.Popen[bytes]":
    folder.logs.mkdir(parents=True, exist_ok=True)
    with folder.log("supervisor").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "client.local.supervisor", str(folder.path), options.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the supervisor and with it everything that it has started. Blocks, so that nothing interrupts it."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _raise_if_failed(exit_code: int | None, folder: StateFolder) -> None:
    # Another supervisor was quicker: that one is waited for.
    if exit_code in (None, EXIT_ALREADY_RUNNING):
        return
    said = folder.log("supervisor").read_text().strip()
    if exit_code == EXIT_CONFIG:
        raise ConfigError(said)
    raise StartFailed(f"the supervisor has ended: {said}", "supervisor")


async def stop(folder: StateFolder) -> bool:
    """Ends the cluster and everything it has started, and returns whether there was one. Leaves only logs."""
    running = folder.has_supervisor
    if running and not await _ended_after(folder, signal.SIGTERM, STOP_SECONDS):
        await _ended_after(folder, signal.SIGKILL, START_SECONDS)
    # Owning the folder removes what a supervisor that was killed has left.
    with contextlib.suppress(AlreadyRunning), folder.owned():
        pass
    return running


async def _ended_after(folder: StateFolder, number: signal.Signals, seconds: float) -> bool:
    """Sends the signal, as soon as the supervisor's id is known, and says whether it ended within the time."""
    sent = False
    try:
        async with timeout(seconds):
            while folder.has_supervisor:
                pid = folder.supervisor_pid()
                if pid is not None and not sent:
                    os.kill(pid, number)
                    sent = True
                await asyncio.sleep(POLL_SECONDS)
    except asyncio.TimeoutError:
        return False
    return True
