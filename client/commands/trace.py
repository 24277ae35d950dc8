"""`baton trace verify TRACE_ID`: holds one request's trace against the contract of docs/tracing.md."""

import argparse
import asyncio
import time

from client.local.state import StateFolder
from client.traces.contract import VERSION, Verdict, verify
from client.traces.reading import ReadTrace, fetch
from rpc.errors import RequestNotFound

DEFAULT_URL = "http://127.0.0.1:16686"
POLL_SECONDS = 0.25


async def run(arguments: argparse.Namespace) -> int:
    """Prints the outcome, and what is wrong with the trace. Exit code 0 if nothing is."""
    trace, verdict = await _settled(arguments.url or _local_url(), arguments.trace_id, arguments.wait)
    count = len(trace.spans)
    print(f"{verdict.outcome}: {count} spans, {len(verdict.faults)} faults by version {VERSION} of the contract")
    for fault in verdict.faults:
        print(f"  {fault}")
    return 1 if verdict.faults else 0


async def _settled(url: str, trace_id: str, wait_seconds: float) -> tuple[ReadTrace, Verdict]:
    """The trace and the verdict; while it has faults, spans may be on their way, for so long."""
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
    """Where the local cluster shows its traces, else where Jaeger does by default."""
    state = StateFolder().read()
    addresses = [each.address for each in state.processes if each.role == "traces"] if state else []
    return f"http://{addresses[0]}" if addresses else DEFAULT_URL
