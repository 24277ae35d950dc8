"""The supervisor keeps processes running; small programs take the place of workers."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from support.eventually import eventually

from cli.local.plan import ProcessPlan
from cli.local.state import ProcessState
from cli.local.supervisor import Keeper
from runtime.aio import timeout

SLEEP = "import time; print('here', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
# Leaves a child that does not hear of its parent's end.
PARENT = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); \
print(p.pid, flush=True); {SLEEP}"
# What a supervisor does, as a program of its own, so that it can be killed.
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from cli.local.plan import ProcessPlan
from cli.local.supervisor import Keeper

async def main():
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    plan = ProcessPlan(name="one", role="decode", address="", command=command)
    async with Keeper(Path(sys.argv[1]), lambda state: print(state.pid, flush=True), {}).keep([plan]):
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Kept:
    """A keeper's report of its one process."""

    def __init__(self) -> None:
        self.states: list[ProcessState] = []

    @property
    def now(self) -> ProcessState:
        return self.states[-1]

    @property
    def pids(self) -> list[int]:
        return [state.pid for state in self.states if state.pid]


@asynccontextmanager
async def kept(folder: Path, program: str, gpu: str = "") -> AsyncIterator[Kept]:
    plan = ProcessPlan(name="one", role="decode", address="", command=(sys.executable, "-c", program), gpu=gpu)
    seen = Kept()
    async with Keeper(folder, seen.states.append, {"GREETING": "hello"}, stop_seconds=1.0).keep([plan]):
        yield seen


def log_of(folder: Path) -> list[str]:
    """The lines of the process's log."""
    log = folder / "one.log"
    return log.read_text().splitlines() if log.exists() else []


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async with kept(tmp_path, SLEEP) as process:
        await eventually(lambda: bool(process.pids))
        os.kill(process.pids[0], signal.SIGKILL)
        await eventually(lambda: len(process.pids) == 2)
        assert (process.now.restarts, process.now.last_exit) == (1, -signal.SIGKILL)


async def test_a_process_that_starts_later_is_waited_for_and_can_be_left_before(tmp_path: Path) -> None:
    command = (sys.executable, "-c", SLEEP)
    first = ProcessPlan(name="one", role="decode", address="", command=command)
    later = first.model_copy(update={"name": "two", "starts_after_seconds": 0.5})
    never = first.model_copy(update={"name": "three", "starts_after_seconds": 60.0})
    states: list[ProcessState] = []
    async with timeout(30), Keeper(tmp_path, states.append, {}, stop_seconds=1.0).keep([later, never, first]):
        await eventually(lambda: len(states) == 2)
    assert [state.name for state in states[:2]] == ["one", "two"]
    assert states[1].started_at - states[0].started_at >= 0.4


async def test_a_process_that_ends_at_once_is_started_ever_more_slowly(tmp_path: Path) -> None:
    async with kept(tmp_path, "pass") as process:
        await eventually(lambda: len(process.pids) == 3)
    first, second, third = (state.started_at for state in process.states if state.pid)
    assert second - first >= 0.5
    assert third - second >= 1.0


async def test_leaving_ends_the_process(tmp_path: Path) -> None:
    async with kept(tmp_path, SLEEP) as process:
        await eventually(lambda: bool(process.pids))
    assert not is_alive(process.pids[0])


async def test_leaving_kills_a_process_that_ignores_the_request(tmp_path: Path) -> None:
    async with timeout(30), kept(tmp_path, DEAF) as process:
        await eventually(lambda: log_of(tmp_path) == ["here"])
    assert not is_alive(process.pids[0])


async def test_leaving_kills_the_children_of_a_process(tmp_path: Path) -> None:
    async with kept(tmp_path, PARENT):
        await eventually(lambda: len(log_of(tmp_path)) == 2)
    child = int(log_of(tmp_path)[0])
    await eventually(lambda: not is_alive(child))


async def test_a_supervisor_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SUPERVISOR, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert supervisor.stdout is not None
    child = int(await supervisor.stdout.readline())
    assert is_alive(child)
    supervisor.kill()
    await supervisor.wait()
    await eventually(lambda: not is_alive(child))


async def test_output_and_errors_go_to_the_processs_log(tmp_path: Path) -> None:
    program = f"import os, sys; print(os.environ['GREETING'], file=sys.stderr); {SLEEP}"
    async with kept(tmp_path, program):
        await eventually(lambda: log_of(tmp_path) == ["hello", "here"])


async def test_a_process_sees_the_gpu_that_is_its_own(tmp_path: Path) -> None:
    program = f"import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); {SLEEP}"
    async with kept(tmp_path, program, gpu="5"):
        await eventually(lambda: log_of(tmp_path)[:1] == ["5"])
