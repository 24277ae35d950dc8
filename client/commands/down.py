"""`baton down`: ends the cluster of `baton up`."""

import argparse

from client.local.lifecycle import stop
from client.local.state import StateFolder


async def run(_: argparse.Namespace) -> int:
    """Returns when no process of the cluster is left."""
    folder = StateFolder()
    print("ended" if await stop(folder) else "nothing is running")
    return 0
