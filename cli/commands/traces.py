"""`baton traces` shows traces on a page; `baton trace verify` checks one against the contract in docs/tracing.md."""

import argparse
import asyncio
import contextlib
import time

from baton.errors import RequestNotFound
from cli.local.state import StateFolder
from devtools.trace_viewer.api import open_viewer
from devtools.trace_viewer.contract import VERSION, Verdict, verify
from devtools.trace_viewer.reading import ReadTrace, fetch
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


DEFAULT_URL = "http://127.0.0.1:16686"
POLL_SECONDS = 0.25


async def verify_trace(arguments: argparse.Namespace) -> int:
    """Prints the outcome and the faults of the trace. Exit code 0 if there are none."""
    trace, verdict = await _fetch_and_verify(arguments.url or _local_url(), arguments.trace_id, arguments.wait)
    count = len(trace.spans)
    print(f"{verdict.outcome}: {count} spans, {len(verdict.faults)} faults by version {VERSION} of the contract")
    for fault in verdict.faults:
        print(f"  {fault}")
    return 1 if verdict.faults else 0


async def _fetch_and_verify(url: str, trace_id: str, wait_seconds: float) -> tuple[ReadTrace, Verdict]:
    """The trace and the verdict. Retries for `wait_seconds` while spans may still arrive."""
    ends_at = time.monotonic() + wait_seconds
    while True:
        try:
            trace = await fetch(url, trace_id)
            verdict = verify(trace)
            if not verdict.faults or time.monotonic() > ends_at:
                return trace, verdict
        except RequestNotFound:
            if time.monotonic() > ends_at:
                raise
        await asyncio.sleep(POLL_SECONDS)


def _local_url() -> str:
    """The URL of the local cluster's traces, else Jaeger's default."""
    state = StateFolder().read()
    addresses = [each.address for each in state.processes if each.role == "traces"] if state else []
    return f"http://{addresses[0]}" if addresses else DEFAULT_URL
