"""The cluster of `baton up`: `baton status`, `baton logs` and `baton down`."""

import argparse
import time

from cli.local.lifecycle import stop
from cli.local.state import ProcessState, StateFolder, follow, last_lines
from cli.terminal import output, table


async def show_logs(arguments: argparse.Namespace) -> int:
    """Prints the end of each log, with the process's name on each line; with `--follow` until Ctrl-C."""
    folder = StateFolder()
    names = arguments.names or sorted(path.stem for path in folder.logs.glob("*.log"))
    if unknown := [name for name in names if not folder.log(name).is_file()]:
        print(f"no log of {', '.join(unknown)} in {folder.logs}")
        return 1
    if not names:
        print(f"no logs in {folder.logs}")
        return 0
    width = max(map(len, names))
    sizes = {name: folder.log(name).stat().st_size for name in names}
    for name in names:
        for line in last_lines(folder.log(name), arguments.lines):
            print(f"{name:{width}} | {line}")
    if arguments.follow:
        async for name, line in follow({name: folder.log(name) for name in names}, sizes):
            print(f"{name:{width}} | {line}", flush=True)
    return 0


async def stop_cluster(_: argparse.Namespace) -> int:
    """Returns after all processes of the cluster have exited."""
    folder = StateFolder()
    print("stopped" if await stop(folder) else "nothing is running")
    return 0


async def show_status(_: argparse.Namespace) -> int:
    """Prints a table of processes. Exit code 1 unless all of them run."""
    state = StateFolder().read()
    if state is None:
        print("nothing is running: `baton up` (make up) starts a cluster")
        return 1
    columns = ["process", "pid", "state", "uptime", "restarts", "address", "metrics"]
    numbers = ["pid", "uptime", "restarts"]
    output().print(table(columns, [_process_row(each) for each in state.processes], numbers=numbers))
    for each in state.processes:
        if each.openai:
            print(f"{each.name} serves OpenAI's API at http://{each.openai}/v1")
    return 0 if all(each.pid for each in state.processes) else 1


def _process_row(process: ProcessState) -> list[str]:
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
