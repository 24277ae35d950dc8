"""`baton logs`: the logs of the processes of `baton up`."""

import argparse

from cli.local.logs import follow, last_lines
from cli.local.state import StateFolder


async def run(arguments: argparse.Namespace) -> int:
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
