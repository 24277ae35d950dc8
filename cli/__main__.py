"""The `baton` command: runs a subcommand, prints an error in one line, and exits with a code."""

import argparse
import asyncio
import importlib
import os
import signal
import sys

from baton.errors import BatonError
from cli.address import find_address
from cli.arguments import parse
from cli.failures import describe, exit_code

INTERRUPTED = 130


def main() -> None:
    """Exits with 0 for success, 2 for a request to fix, 130 after Ctrl-C, 1 for everything else."""
    _open_streams()
    arguments = parse()
    try:
        code = asyncio.run(_run(arguments))
    except BatonError as error:
        address = find_address(arguments.address).value if hasattr(arguments, "address") else None
        print(describe(error, address), file=sys.stderr)
        code = exit_code(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except OSError as error:
        # The reader of our output has closed the pipe, or its disk is full: discard the rest of the buffer.
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _open_streams() -> None:
    """Of the standard streams, those that are closed are the null device."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


async def _run(arguments: argparse.Namespace) -> int:
    # Signals cancel the command, so that it can clean up; Python 3.10 does not do this itself.
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    # Imported when needed: `baton doctor` has to run even if packages are missing.
    module, _, name = arguments.function.rpartition(".")
    run = getattr(importlib.import_module(module), name)
    # A signal that arrived meanwhile cancels the command here, before it starts anything. sleep(0) would be too short.
    await asyncio.sleep(0.001)
    code: int = await run(arguments)
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    main()
