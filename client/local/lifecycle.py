"""Starting and ending the supervisor of a local cluster, from a command in the foreground."""

import asyncio
import os
import signal
import subprocess
import sys

from client.local.plan import ROOT, ClusterOptions
from client.local.readiness import StartFailed
from client.local.state import StateFolder
from rpc.aio import timeout

START_SECONDS = 15.0
# Longer than a supervisor needs: two rounds of STOP_SECONDS.
STOP_SECONDS = 25.0
POLL_SECONDS = 0.05


async def start(folder: StateFolder, options: ClusterOptions) -> None:
    """Starts a supervisor in a session of its own, and returns when it has the folder. Raises StartFailed."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    with folder.log("supervisor").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "client.local.supervisor", str(folder.path), options.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )
    async with timeout(START_SECONDS):
        while folder.read() is None:
            if process.poll() is not None:
                raise StartFailed("the supervisor has ended", "supervisor")
            await asyncio.sleep(POLL_SECONDS)


async def stop(folder: StateFolder) -> bool:
    """Ends the cluster and everything it has started, and returns whether there was one. Leaves only logs."""
    running = folder.has_supervisor
    if running and not await _ended_after(folder, signal.SIGTERM, STOP_SECONDS):
        await _ended_after(folder, signal.SIGKILL, START_SECONDS)
    # What a supervisor that was killed could not remove.
    folder.clear()
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
