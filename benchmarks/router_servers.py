"""What a token and a request cost the router: each server and each way to call workers, alternated in one run.

    python -m benchmarks.router_servers [--streams 64 256 1024] [--rounds 3] [--output FILE]

The candidates are routers of processes of their own, before the same simulated workers: `server: grpcio` and
`http2`, with a stream for each call to a worker, and with one stream for all (`multiplex`). The client comes over 8
connections, and goes from router to router, round after round. Paced streams have 128 tokens at 30 a second; flat
out the engine waits for nothing; a request is one of 512 prompt tokens and 1 token. Printed is CPU time of the
router's process, all its threads: the median of the rounds, and as a ratio to `grpcio` with a stream a call in the
same rounds. `worker` is the workers' process, engine included, in the same way.
"""

import argparse
import os
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import child, cpu_nanoseconds, received, run_router
from benchmarks.request_cost import patient_router
from benchmarks.router_overhead import FLAT, PACED, Client, Load, quantiles, run_workers
from discovery.record import WorkerRecord
from router.config import RouterConfig
from rpc.server import ServerKind

REQUESTS = 640
LANES = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A router's configuration."""

    name: str
    server: ServerKind
    multiplex: bool

    @property
    def config(self) -> RouterConfig:
        return patient_router(self.server).model_copy(update={"multiplex": self.multiplex})


BASE = Candidate("grpcio, a stream a call", "grpcio", multiplex=False)
CANDIDATES = (
    BASE,
    Candidate("grpcio, one stream", "grpcio", multiplex=True),
    Candidate("http2, a stream a call", "http2", multiplex=False),
    Candidate("http2, one stream", "http2", multiplex=True),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU for each token or request, and what the client saw."""

    router: float
    worker: float
    first_token_seconds: float
    tokens_a_message: float


@dataclass(slots=True)
class Measured:
    """A candidate that serves, and what each round of each load has cost."""

    candidate: Candidate
    client: Client
    pid: int
    workers_pid: int
    costs: dict[str, list[Cost]] = field(default_factory=dict)

    async def streams(self, model: str, number: int) -> None:
        """One round of streams; the costs are of a token."""
        before = self._cpu()
        load = await self.client.streams(self.candidate.name, model, number)
        how = "paced" if model == PACED else "flat out"
        self._note(f"{number} streams {how}, a token", before, load, load.tokens)

    async def requests(self) -> None:
        """One round of requests; the costs are of a request."""
        before = self._cpu()
        load = await self.client.requests(self.candidate.name, REQUESTS, LANES)
        self._note("1 token, a request", before, load, load.requests)

    def _cpu(self) -> tuple[int, int]:
        return cpu_nanoseconds(self.pid), cpu_nanoseconds(self.workers_pid)

    def _note(self, name: str, before: tuple[int, int], load: Load, count: int) -> None:
        router, worker = ((now - was) / count / 1000 for now, was in zip(self._cpu(), before, strict=True))
        first = quantiles(load.first_token_seconds)[0]
        self.costs.setdefault(name, []).append(Cost(router, worker, first, load.tokens / load.messages))


@asynccontextmanager
async def measured() -> AsyncIterator[list[Measured]]:
    """All candidates, before the same workers."""
    async with AsyncExitStack() as stack:
        workers, workers_pid = await stack.enter_async_context(child(run_workers))
        records: Sequence[WorkerRecord] = await received(workers)
        prefill = next(record.address for record in records if record.worker_id == f"{PACED}-prefill")
        found = []
        for candidate in CANDIDATES:
            pipe, pid = await stack.enter_async_context(child(run_router, candidate.config))
            pipe.send(records)
            client = Client(await received(pipe), pid, prefill)
            stack.push_async_callback(client.close)
            found.append(Measured(candidate, client, pid, workers_pid))
        yield found


async def main(streams: Sequence[int], rounds: int) -> str:
    load_before = os.getloadavg()[0]
    async with measured() as candidates:
        for one in candidates:
            await one.client.requests("warm-up", LANES, LANES)
        for _ in range(rounds):
            for one in candidates:
                await one.requests()
            for model in (PACED, FLAT):
                for number in streams:
                    for one in candidates:
                        await one.streams(model, number)
    table = "\n".join(rows(candidates))
    return f"{table}\n\nLoad average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after, {rounds} rounds."


def rows(candidates: Sequence[Measured]) -> list[str]:
    """The table."""
    lines = [
        "| load | router | us of CPU | least - most | ratio | worker's us | ratio | TTFT p50, ms | tokens a message |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = next(one for one in candidates if one.candidate is BASE)
    for name, before in base.costs.items():
        for one in candidates:
            costs = one.costs[name]
            pairs = list(zip(costs, before, strict=True))
            router = [cost.router for cost in costs]
            cells = [
                name,
                one.candidate.name,
                f"{statistics.median(router):.1f}",
                f"{min(router):.1f} - {max(router):.1f}",
                f"{statistics.median(cost.router / other.router for cost, other in pairs):.2f}",
                f"{statistics.median(cost.worker for cost in costs):.1f}",
                f"{statistics.median(cost.worker / other.worker for cost, other in pairs):.2f}",
                f"{statistics.median(cost.first_token_seconds for cost in costs) * 1e3:.1f}",
                f"{statistics.median(cost.tokens_a_message for cost in costs):.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    printed = uvloop.run(main(arguments.streams, arguments.rounds))
    print(printed)
    if arguments.output:
        arguments.output.write_text(printed + "\n", encoding="utf-8")
