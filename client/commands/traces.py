"""`baton traces`: receives traces and shows them, until it is interrupted."""

import argparse
import asyncio
import contextlib

from client.traces.store import Bounds
from client.traces.viewer import open_viewer
from rpc.telemetry import configure_logging


async def run(arguments: argparse.Namespace) -> int:
    """Prints where it listens, and serves until it is told to end, which is no failure."""
    configure_logging("console", "warning", process="traces")
    bounds = Bounds(max_traces=arguments.max_traces, max_bytes=arguments.max_mib * 2**20)
    async with open_viewer(arguments.otlp, arguments.listen, bounds) as viewer:
        print(f"traces are received at {viewer.otlp_address} (OTLP/gRPC) and shown at {viewer.url}", flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    return 0
