"""The `baton` command: runs one command, says in one line what went wrong, and answers with an exit code."""

import argparse
import asyncio
import importlib
import os
import signal
import sys

from client.address import find_address
from client.arguments import parse
from client.failures import describe, exit_code
from rpc.errors import BatonError

INTERRUPTED = 130


def main() -> None:
    """Ends the process: 0 for success, 2 for a request that is wrong, 130 after Ctrl-C, 1 for everything else."""
    arguments = parse()
    try:
        code = asyncio.run(_run(arguments))
    except BatonError as error:
        print(describe(error, _address(arguments)), file=sys.stderr)
        code = exit_code(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever reads our output has had enough; what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


async def _run(arguments: argparse.Namespace) -> int:
    # Signals cancel the command, so that it stops what it has started; Python 3.10 would not do it by itself.
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    # Loaded when needed: `baton doctor` has to run where half of the packages are missing.
    command = importlib.import_module(f"client.commands.{arguments.command}")
    code: int = await command.run(arguments)
    sys.stdout.flush()
    return code


def _address(arguments: argparse.Namespace) -> str | None:
    return find_address(arguments.address).value if hasattr(arguments, "address") else None


if __name__ == "__main__":
    main()
