"""`baton down`: stops the cluster of `baton up`."""

import argparse

from cli.local.lifecycle import stop
from cli.local.state import StateFolder


async def run(_: argparse.Namespace) -> int:
    """Returns after all processes of the cluster have exited."""
    folder = StateFolder()
    print("stopped" if await stop(folder) else "nothing is running")
    return 0
