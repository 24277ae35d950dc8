"""The background process of a local cluster: `python -m cli.local.supervisor FOLDER OPTIONS_JSON`.

It plans, starts and restarts the processes, writes their states to a file, and stops them on SIGTERM. If it is
killed, the kernel kills them.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from cli.local.plan import ClusterOptions, ClusterPlan, ProcessPlan, plan
from cli.local.state import AlreadyRunning, ClusterState, ProcessState, StateFolder
from runtime.aio import TaskGroup, timeout
from runtime.machine import VARIABLE

STOP_SECONDS = 8.0
FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 15.0
# After this long a process counts as stable, and the backoff starts over.
SETTLED_SECONDS = 30.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

Report = Callable[[ProcessState], None]


@dataclass(frozen=True, slots=True)
class Keeper:
    """Keeps processes running. `report` is called with every change; `environment` is added to our own.

    A process has `stop_seconds` to exit after SIGTERM.
    """

    logs: Path
    report: Report
    environment: Mapping[str, str]
    stop_seconds: float = STOP_SECONDS

    @contextlib.asynccontextmanager
    async def keep(self, plans: Iterable[ProcessPlan]) -> AsyncGenerator[None, None]:
        """Keeps all of them running while the context is open; on exit stops all at once and waits for the last."""
        async with TaskGroup() as group:
            tasks = [group.create_task(self._keep(each)) for each in plans]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _keep(self, plan: ProcessPlan) -> None:
        state = ProcessState.of(plan)
        backoff = FIRST_BACKOFF_SECONDS
        await asyncio.sleep(plan.starts_after_seconds)
        while True:
            started = time.monotonic()
            state = await self._run(plan, state)
            if time.monotonic() - started > SETTLED_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)

    async def _run(self, plan: ProcessPlan, state: ProcessState) -> ProcessState:
        """Runs the process once; returns its state after it has exited."""
        process = await self._start(plan)
        try:
            self.report(state.model_copy(update={"pid": process.pid, "started_at": time.time()}))
            code = await process.wait()
        finally:
            await _end(process, self.stop_seconds)
        ended = state.model_copy(update={"restarts": state.restarts + 1, "last_exit": code})
        self.report(ended)
        return ended

    async def _start(self, plan: ProcessPlan) -> asyncio.subprocess.Process:
        with (self.logs / f"{plan.name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *plan.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment, **({VARIABLE: plan.gpu} if plan.gpu else {})},
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )


def _die_with(parent: int) -> Callable[[], None]:
    """Makes the kernel kill the new process when its supervisor dies."""

    def before_exec() -> None:
        if sys.platform != "linux":
            return
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The supervisor may have died between the fork and the line above.
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Terminates the process, waits, and kills it and its children. Cancellation does not interrupt it."""
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with timeout(seconds):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


EXIT_ALREADY_RUNNING = 3
EXIT_CONFIG = 2

# The engine's options set the number of threads; libraries must not add their own.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class Board:
    """The states of all processes, on disk for other commands."""

    def __init__(self, folder: StateFolder, options: ClusterOptions, cluster: ClusterPlan) -> None:
        self._folder = folder
        self._options = options
        self._address = cluster.router_address
        self._processes = {each.name: ProcessState.of(each) for each in cluster.processes}

    def report(self, state: ProcessState) -> None:
        """Records one process's new state, and writes all of them."""
        self._processes[state.name] = state
        self.write()

    def write(self) -> None:
        """Writes the current states."""
        self._folder.write(
            ClusterState(
                options=self._options,
                supervisor_pid=os.getpid(),
                address=self._address,
                processes=tuple(self._processes.values()),
            )
        )


async def supervise(folder: StateFolder, options: ClusterOptions) -> None:
    """Runs the cluster until a signal stops it. The caller owns the folder.

    Raises ConfigError before anything starts.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    cluster = plan(options, folder.path)
    _keep_only_one_older(folder, cluster)
    board = Board(folder, options, cluster)
    board.write()
    keeper = Keeper(folder.logs, board.report, ENVIRONMENT)
    # Workers deregister and send their last spans while they stop, so these stop after them.
    async with keeper.keep([cluster.registry, cluster.traces]), keeper.keep(cluster.servers):
        await stopping.wait()


def _keep_only_one_older(folder: StateFolder, cluster: ClusterPlan) -> None:
    """Starts each log anew, and keeps the previous one as NAME.log.1."""
    folder.logs.mkdir(exist_ok=True)
    for path in (folder.log(each.name) for each in cluster.processes):
        with contextlib.suppress(FileNotFoundError):
            path.replace(path.with_suffix(".log.1"))


def main() -> int:
    """Reads the command line, takes the folder, and runs the cluster."""
    folder = StateFolder(Path(sys.argv[1]))
    options = ClusterOptions.model_validate_json(sys.argv[2])
    try:
        with folder.owned():
            asyncio.run(supervise(folder, options))
    except AlreadyRunning:
        return EXIT_ALREADY_RUNNING
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
