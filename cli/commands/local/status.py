"""`baton status`: the processes of `baton up`."""

import argparse
import time

from cli.local.state import ProcessState, StateFolder
from cli.terminal import output, table


async def run(_: argparse.Namespace) -> int:
    """Prints a table of processes. Exit code 1 unless all of them run."""
    state = StateFolder().read()
    if state is None:
        print("nothing is running: `baton up` (make up) starts a cluster")
        return 1
    columns = ["process", "pid", "state", "uptime", "restarts", "address", "metrics"]
    numbers = ["pid", "uptime", "restarts"]
    output().print(table(columns, [_row(each) for each in state.processes], numbers=numbers))
    for each in state.processes:
        if each.openai:
            print(f"{each.name} serves OpenAI's API at http://{each.openai}/v1")
    return 0 if all(each.pid for each in state.processes) else 1


def _row(process: ProcessState) -> list[str]:
    pid = str(process.pid) if process.pid else "-"
    uptime = _duration(time.time() - process.started_at) if process.pid else "-"
    address = f"http://{process.address}" if process.role == "traces" else process.address
    return [process.name, pid, process.condition, uptime, str(process.restarts), address, process.metrics or "-"]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
