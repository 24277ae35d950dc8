"""`baton move`, `baton drain` and `baton role`: what a worker runs goes elsewhere, and no request ends by it."""

import argparse
import time

from cli.connection import connect


async def move(arguments: argparse.Namespace) -> int:
    """Asks a worker to give answers away; routers move them within a moment."""
    async with connect(arguments) as client:
        streams = await client.move_streams(arguments.worker, streams=arguments.streams)
    print(f"{arguments.worker} gives {streams} {'answer' if streams == 1 else 'answers'} to other workers")
    return 0


async def drain(arguments: argparse.Namespace) -> int:
    """Waits until nothing is left on a worker."""
    started = time.monotonic()
    async with connect(arguments) as client:
        await client.drain_worker(arguments.worker, grace_seconds=arguments.grace)
    print(f"{arguments.worker} is drained after {time.monotonic() - started:.1f} s")
    return 0


async def role(arguments: argparse.Namespace) -> int:
    """Waits until nothing of the other role is left on a worker."""
    started = time.monotonic()
    async with connect(arguments) as client:
        await client.change_role(arguments.worker, arguments.role, timeout_seconds=arguments.timeout)
    print(f"{arguments.worker} has the role {arguments.role} after {time.monotonic() - started:.1f} s")
    return 0


_RUN = {"move": move, "drain": drain, "role": role}


async def run(arguments: argparse.Namespace) -> int:
    """Runs the command of this name."""
    return await _RUN[arguments.command](arguments)
