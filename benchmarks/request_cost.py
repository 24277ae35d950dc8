"""The cost of a request to the router: its function calls, which no other load changes, and its CPU time.

    python -m benchmarks.request_cost [--everything] [--server grpcio] [--beside CHECKOUT] [--rounds 5] [--functions 40]

A request has 512 prompt tokens. For 1 token it calls a prefill worker, for 2 tokens a decode worker too, or a decode
worker alone (`one worker`). It comes in a crowd of 64, or alone. Workers, routers and this client are processes of
their own; `--beside` adds a router of another checkout, and the rounds go from one to the other. CPU time is that of
the router's process, all threads: the median of the rounds. Function calls are those of its event loop's thread,
Python's and C's, as cProfile counts them. `--functions` prints those that take the most time. `--everything` runs the
routers as benchmarks/peers does: with a limit that admission counts against, and a tenth of the requests traced.
"""

import argparse
import asyncio
import cProfile
import os
import pickle
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.loop_lag import LagProbe
from benchmarks.peers.workers import run_viewer
from benchmarks.processes import child, cpu_nanoseconds, received, routing, run_process
from benchmarks.router_overhead import CONNECTIONS, FLAT, SEPARATE, prompts, run_workers
from discovery.record import WorkerRecord
from router.config import AdmissionConfig, ProbeConfig, RouterConfig
from rpc.channels import open_channel
from rpc.server import ServerKind
from rpc.tracing.exporter import TracingConfig

_PROFILED = 192
_HERE = Path(__file__).resolve().parent.parent
_KINDS = {
    "1 token": (1, generate_pb2.TOPOLOGY_DISAGGREGATED),
    "2 tokens": (2, generate_pb2.TOPOLOGY_DISAGGREGATED),
    "2 tokens, one worker": (2, generate_pb2.TOPOLOGY_AGGREGATED),
}
_CROWDS = {"a crowd of 64": 64, "alone": 1}


@dataclass(slots=True)
class Router:
    """A router that serves, and what it has cost."""

    name: str
    process: "subprocess.Popen[bytes]"
    stubs: Sequence[Any]
    microseconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    calls: dict[tuple[str, str], float] = field(default_factory=dict)
    functions: dict[tuple[str, str], str] = field(default_factory=dict)
    lags: dict[tuple[str, str], str] = field(default_factory=dict)  # of its event loop

    async def ask(self, command: str) -> str:
        """Sends a command to the process, and reads its answer."""
        return await asyncio.to_thread(self._ask, command)

    def _ask(self, command: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().decode().strip()

    async def requests(self, kind: str, number: int, lanes: int) -> None:
        """Sends requests, one after another in each lane."""
        texts, turn = prompts(), count()

        async def lane() -> None:
            for _ in range(max(1, number // lanes)):
                request = generate_pb2.GenerateRequest(model=FLAT, prompt=next(texts))
                request.stopping.max_tokens, request.routing.topology = _KINDS[kind]
                async for _ in self.stubs[next(turn) % CONNECTIONS].Generate(request):
                    pass

        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def measure(self, kind: str, crowd: str, number: int) -> None:
        """One round."""
        before = cpu_nanoseconds(self.process.pid)
        await self.requests(kind, number, _CROWDS[crowd])
        took = (cpu_nanoseconds(self.process.pid) - before) / 1000 / number
        self.microseconds.setdefault((kind, crowd), []).append(took)

    async def profile(self, kind: str, crowd: str) -> None:
        """Counts the function calls."""
        await self.ask("profile")
        await self.requests(kind, _PROFILED, _CROWDS[crowd])
        calls, _, path = (await self.ask("stop")).partition(" ")
        self.calls[kind, crowd] = int(calls) / _PROFILED
        self.functions[kind, crowd] = path


def patient_router(server: ServerKind, spans: str = "") -> RouterConfig:
    """A router that loses no worker which shares two cores with everything else, and answers late.

    With an address for spans everything is on. Here, and not in processes.py: a router of another checkout imports that
    one's modules.
    """
    return RouterConfig(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        drain_seconds=0,
        server=server,
        probe=ProbeConfig(timeout_seconds=20, hung_seconds=60),
        routing=SEPARATE,
        admission=AdmissionConfig(max_running_per_worker=4096 if spans else 0),
        tracing=TracingConfig(endpoint=spans, sample_ratio=0.1),
    )


def serve_router(server: ServerKind, folder: str, spans: str) -> None:
    """Routes to the workers whose records come first from stdin, until it ends.

    "profile" and "stop" count calls, "lag" and "lagged" measure how late its event loop is.
    """
    records = [WorkerRecord.from_json(each) for each in pickle.load(sys.stdin.buffer)]
    answers = os.fdopen(os.dup(1), "w")

    async def serve() -> None:
        profile, number, lag = cProfile.Profile(), count(), LagProbe()
        async with routing(patient_router(server, spans), records) as address:
            print(address, file=answers, flush=True)
            while command := await asyncio.to_thread(sys.stdin.buffer.readline):
                if command == b"profile\n":
                    # CPU time: the clock on the wall has other processes' time in it.
                    profile = cProfile.Profile(time.thread_time)
                    profile.enable()
                    print(file=answers, flush=True)
                elif command == b"lag\n":
                    lag.start()
                    print(file=answers, flush=True)
                elif command == b"lagged\n":
                    print(*lag.stop(), file=answers, flush=True)
                else:
                    profile.disable()
                    stats = pstats.Stats(profile)
                    path = f"{folder}/{Path.cwd().name}.{next(number)}"
                    stats.dump_stats(path)
                    print(stats.total_calls, path, file=answers, flush=True)  # type: ignore[attr-defined]

    run_process(serve)


@asynccontextmanager
async def router_of(
    checkout: Path, server: ServerKind, records: Sequence[WorkerRecord], folder: str, spans: str = ""
) -> AsyncIterator[Router]:
    """A router of a checkout, which finds these workers."""
    process = subprocess.Popen(  # noqa: ASYNC220  # once, before anything is measured
        [sys.executable, __file__, "--server", server, "--serve", folder, "--spans", spans],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    try:
        # As registries keep them: another checkout's class may have other fields.
        pickle.dump([each.to_json() for each in records], process.stdin)
        process.stdin.flush()
        address = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
        async with AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(open_channel(address)) for _ in range(CONNECTIONS)]
            yield Router(
                checkout.name, process, [inference_service_pb2_grpc.InferenceServiceStub(one) for one in channels]
            )
    finally:
        process.stdin.close()
        process.wait(10)


async def spans_address(stack: AsyncExitStack) -> str:
    """The address of a process that takes spans, until the stack is closed."""
    pipe, _ = await stack.enter_async_context(child(run_viewer))
    address: str = await received(pipe)
    return address


@asynccontextmanager
async def routers_of(arguments: argparse.Namespace) -> AsyncIterator[list[Router]]:
    """The routers of the arguments' checkouts and of this one, warm, before the same workers.

    Once they have been measured, prints the functions that the arguments ask for.
    """
    async with AsyncExitStack() as stack:
        folder = arguments.profiles or stack.enter_context(tempfile.TemporaryDirectory())
        pipe: Connection
        pipe, _ = await stack.enter_async_context(child(run_workers))
        records: Sequence[WorkerRecord] = await received(pipe)
        spans = await spans_address(stack) if arguments.everything else ""
        routers = [
            await stack.enter_async_context(router_of(one, arguments.server, records, folder, spans))
            for one in [*arguments.beside, _HERE]
        ]
        for router in routers:
            await router.requests("1 token", 128, 64)
        yield routers
        if arguments.functions:
            for router in routers:
                for load, path in router.functions.items():
                    print(router.name, *load)
                    pstats.Stats(path).strip_dirs().sort_stats("tottime").print_stats(arguments.functions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what routers_of reads."""
    parser.add_argument("--server", choices=("grpcio", "http2"), default="http2")
    parser.add_argument("--beside", type=Path, action="append", default=[], help="another checkout, with its stubs")
    parser.add_argument("--functions", type=int, default=0)
    parser.add_argument("--profiles", help="a folder that keeps the profiles, for pstats")
    parser.add_argument("--everything", action="store_true", help="admission and tracing, too")


async def main(arguments: argparse.Namespace) -> str:
    load_before = os.getloadavg()[0]
    async with routers_of(arguments) as routers:
        loads = [(kind, crowd) for kind in arguments.kinds for crowd in _CROWDS]
        for round_number in range(arguments.rounds):
            for load in loads:
                for router in routers if round_number % 2 else reversed(routers):
                    await router.measure(*load, arguments.requests)
        for router in routers:
            for load in loads:
                await router.profile(*load)
    lines = list(_rows(routers, loads))
    return "\n".join([*lines, f"\nLoad average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after."])


def _rows(routers: Sequence[Router], loads: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield "| request | comes in | router | function calls | us of CPU | least | ratio of each round, median |"
    yield "|---|---|---|---|---|---|---|"
    for load in loads:
        base = routers[0].microseconds[load]
        for router in routers:
            took = router.microseconds[load]
            ratio = statistics.median(one / other for one, other in zip(took, base, strict=True))
            cells = [*load, router.name, f"{router.calls[load]:.0f}", f"{statistics.median(took):.0f}"]
            yield "| " + " | ".join([*cells, f"{min(took):.0f}", f"{ratio:.2f}"]) + " |"


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--kinds", nargs="+", choices=tuple(_KINDS), default=list(_KINDS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--spans", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve_router(chosen.server, chosen.serve, chosen.spans)
    else:
        print(uvloop.run(main(chosen)))
