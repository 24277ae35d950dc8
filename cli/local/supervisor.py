"""The background process of a local cluster: `python -m cli.local.supervisor FOLDER OPTIONS_JSON`.

It plans, starts and restarts the processes, writes their states to a file, and stops them on SIGTERM. If it is
killed, the kernel kills them.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from baton.errors import ConfigError
from cli.local.plan import ClusterOptions, ClusterPlan, plan
from cli.local.processes import Keeper
from cli.local.state import AlreadyRunning, ClusterState, ProcessState, StateFolder

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
