"""`baton traces`: receives traces, and shows them on a page."""

import argparse
import asyncio
import contextlib

from devtools.trace_viewer.api import open_viewer
from devtools.trace_viewer.store import Bounds
from runtime.telemetry.logs import configure_logging


async def serve_traces(arguments: argparse.Namespace) -> int:
    """Prints its addresses and serves until a signal; the exit code is then 0."""
    configure_logging("console", "warning", process="traces")
    bounds = Bounds(max_traces=arguments.max_traces, max_bytes=arguments.max_mib * 2**20)
    async with open_viewer(arguments.otlp, arguments.listen, bounds) as viewer:
        print(f"traces are received at {viewer.otlp_address} (OTLP/gRPC) and shown at {viewer.url}", flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    return 0
