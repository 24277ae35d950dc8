"""Clusters whose spans go to a trace viewer, and the verdict on a request's trace."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from grpc import aio
from support.cluster.in_process import FAST_ROUTER, Bench, bench
from support.eventually import PATIENCE_SECONDS
from support.servers.otlp import viewing

from baton.inference.v1 import generate_pb2 as pb
from devtools.trace_viewer import reading
from devtools.trace_viewer.api import Viewer
from devtools.trace_viewer.contract import Verdict, verify
from devtools.trace_viewer.reading import ReadTrace, read
from rpc.tracing.exporter import TracingConfig
from services.config import WorkerConfig


@dataclass
class Traced:
    """A cluster whose spans go to a viewer."""

    running: Bench
    viewer: Viewer

    def trace(self) -> ReadTrace:
        """The trace of the only Generate so far."""
        traces = [read(reading.trace(trace)) for trace in self.viewer.store.newest_first()]
        (found,) = [trace for trace in traces if trace.named("baton.generate")]
        return found

    async def verdict(self) -> Verdict:
        """The contract's verdict, once the trace has no faults or no more spans arrive."""
        ends_at = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        verdict = Verdict("no trace", ())
        while verdict.faults or verdict.outcome == "no trace":
            assert asyncio.get_running_loop().time() < ends_at, verdict
            await asyncio.sleep(0.05)
            if any(read(reading.trace(trace)).named("baton.generate") for trace in self.viewer.store.newest_first()):
                verdict = verify(self.trace())
        return verdict


@asynccontextmanager
async def traced(*configs: WorkerConfig, **router: Any) -> AsyncIterator[Traced]:
    """A router and these workers, recording everything."""
    async with viewing() as viewer:
        tracing = {"tracing": TracingConfig(endpoint=viewer.otlp_address, export_interval_seconds=0.05)}
        workers = [config.model_copy(update=tracing) for config in configs]
        options = {"router_id": "r1", "allow_faults": True, **tracing, **router}
        async with bench(*workers, router=FAST_ROUTER.model_copy(update=options)) as running:
            yield Traced(running, viewer)


async def generated(cluster: Traced, *, plan: str = "", **fields: Any) -> Verdict:
    """Runs one request, which may fail, and returns the verdict. `plan` is its fault plan (docs/faults.md)."""
    metadata = (("x-baton-fault", plan),) if plan else ()
    await to_the_end(cluster.running.stub.Generate(pb.GenerateRequest(**fields), metadata=metadata))
    return await cluster.verdict()


async def tokens(call: Any, count: int) -> None:
    """Reads until `count` tokens have arrived."""
    while count > 0:
        count -= len((await call.read()).token.token_ids)


async def to_the_end(call: Any) -> None:
    """Reads a stream to its end, and ignores a failure."""
    with suppress(aio.AioRpcError, asyncio.CancelledError):
        while await call.read() is not aio.EOF:
            pass
