"""What a token and a request cost the router, beside routers of other projects, in one run: `make bench-router`.

    python -m benchmarks.peers.compare [--streams 64 256] [--rounds 3] [--folder .bench-router] [--output FOLDER]

Each round gives every router the same load, one router after the other: requests of one token, streams of 128 tokens
at 30 a second, and streams as fast as the router goes; all prompts have 512 bytes. Printed is CPU time of the router's
processes, the median of the rounds and its ratio to Baton's in the same rounds. What is and is not comparable: Baton
tokenizes (here one token a byte), prefills and decodes on different workers, and detokenizes; vllm-router and
sglang-router relay the bytes of an engine whose answers are ready-made. Baton's client is gRPC's over 8 connections,
theirs has a connection for each stream, as HTTP/1.1 has it. A router that cannot be started is named, and left out.
"""

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from benchmarks.peers import routers
from benchmarks.peers.environments import FOLDER
from benchmarks.peers.http_load import HttpClient
from benchmarks.peers.plot import bars
from benchmarks.processes import child, cpu_nanoseconds, received
from benchmarks.router_overhead import FLAT, PACED, TOKENS, Client, Load, quantiles, run_workers
from benchmarks.router_servers import Candidate, run_router
from cli.local.ports import free_port
from discovery.record import WorkerRecord

REQUESTS, LANES = 512, 64
BATON = Candidate("Baton (http2)", "http2", multiplex=True)
BATON_GRPCIO = Candidate("Baton (grpcio)", "grpcio", multiplex=True)


class LoadClient(Protocol):
    """Gives one router its load."""

    async def paced(self, number: int) -> Load:
        """Streams of 128 tokens, 30 a second."""

    async def flat(self, number: int) -> Load:
        """Streams of 128 tokens, as fast as they come."""

    async def requests(self) -> Load:
        """Requests of one token."""


class GrpcLoad:
    """Baton's."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def paced(self, number: int) -> Load:
        return await self._client.streams("", PACED, number)

    async def flat(self, number: int) -> Load:
        return await self._client.streams("", FLAT, number)

    async def requests(self) -> Load:
        return await self._client.requests("", REQUESTS, LANES)


class HttpLoad:
    """That of routers with OpenAI's API."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def paced(self, number: int) -> Load:
        return await self._client.streams("paced", number, TOKENS, 1.0)

    async def flat(self, number: int) -> Load:
        return await self._client.streams("flat", number, TOKENS, 0.0)

    async def requests(self) -> Load:
        return await self._client.requests("flat", REQUESTS, LANES)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU for each token or request, and what the client saw."""

    microseconds: float
    first_token_seconds: float
    tokens_a_message: float


@dataclass(slots=True)
class Router:
    """A router that serves, and what each round of each load has cost."""

    name: str
    client: LoadClient
    pid: int
    costs: dict[str, list[Cost]] = field(default_factory=dict)

    async def measure(self, streams: Sequence[int]) -> None:
        """One round of all loads."""
        await self._note("a request of 1 token", self.client.requests, is_request=True)
        for number in streams:
            await self._note(f"a token, {number} streams paced", partial(self.client.paced, number))
            await self._note(f"a token, {number} streams flat out", partial(self.client.flat, number))

    async def _note(self, name: str, run: Callable[[], Awaitable[Load]], *, is_request: bool = False) -> None:
        before = cpu_nanoseconds(self.pid)
        load = await run()
        count = load.requests if is_request else load.tokens
        cost = Cost(
            (cpu_nanoseconds(self.pid) - before) / count / 1000,
            quantiles(load.first_token_seconds)[0],
            load.tokens / load.messages,
        )
        self.costs.setdefault(name, []).append(cost)


@asynccontextmanager
async def baton(candidate: Candidate, records: Sequence[WorkerRecord]) -> AsyncIterator[Router]:
    """Baton's router, before the simulated workers."""
    prefill = next(record.address for record in records if record.worker_id == f"{PACED}-prefill")
    async with child(run_router, candidate) as (pipe, pid):
        pipe.send(records)
        client = Client(await received(pipe), pid, prefill)
        try:
            yield Router(candidate.name, GrpcLoad(client), pid)
        finally:
            await client.close()


async def start_all(stack: AsyncExitStack, folder: Path) -> list[Router]:
    """All routers that can be started."""
    pipe, _ = await stack.enter_async_context(child(run_workers))
    records: Sequence[WorkerRecord] = await received(pipe)
    found = [await stack.enter_async_context(baton(each, records)) for each in (BATON, BATON_GRPCIO)]
    ports = (free_port(), free_port())
    log = folder / "log"
    await stack.enter_async_context(routers.engines(ports, log))
    for name, command in (("vllm-router", routers.vllm_router), ("sglang-router", routers.sglang_router)):
        port = free_port()
        try:
            peer = await stack.enter_async_context(
                routers.peer(name, command(folder, port, free_port(), ports), port, log)
            )
            client = HttpClient(port)
            stack.push_async_callback(client.close)
            found.append(Router(name, HttpLoad(client), peer.pid))
        except (OSError, asyncio.TimeoutError) as error:
            print(f"{name} is left out: {error!r}; see {log}", file=sys.stderr)
    return found


async def main(streams: Sequence[int], rounds: int, folder: Path) -> list[Router]:
    async with AsyncExitStack() as stack:
        found = await start_all(stack, folder)
        for router in tuple(found):
            try:
                await router.client.requests()  # To warm up.
            except (OSError, asyncio.TimeoutError) as error:
                print(f"{router.name} is left out: {error!r}", file=sys.stderr)
                found.remove(router)
        for _ in range(rounds):
            for router in found:
                await router.measure(streams)
    return found


def table(found: Sequence[Router]) -> str:
    """Markdown."""
    lines = [
        "| load | router | us of CPU | least - most | to Baton's | TTFT p50, ms | tokens a message |",
        "|---|---|---|---|---|---|---|",
    ]
    first = found[0]
    for load in first.costs:
        for router in found:
            costs, own = router.costs[load], first.costs[load]
            spent = [cost.microseconds for cost in costs]
            ratio = statistics.median(a.microseconds / b.microseconds for a, b in zip(costs, own, strict=True))
            cells = [
                *(load, router.name, f"{statistics.median(spent):.1f}", f"{min(spent):.1f} - {max(spent):.1f}"),
                f"{ratio:.2f}",
                f"{statistics.median(cost.first_token_seconds for cost in costs) * 1e3:.1f}",
                f"{statistics.median(cost.tokens_a_message for cost in costs):.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: Sequence[Router]) -> str:
    """The medians, as SVG."""
    groups = {
        load: {router.name: statistics.median(cost.microseconds for cost in router.costs[load]) for router in found}
        for load in found[0].costs
    }
    return bars("Microseconds of the router's CPU; shorter is better", groups, [router.name for router in found])


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path, help="a folder for router_peers.md and router_peers.svg")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    measured = uvloop.run(main(arguments.streams, arguments.rounds, arguments.folder))
    printed = f"{table(measured)}\n\nLoad average {before:.1f} before and {os.getloadavg()[0]:.1f} after."
    print(printed)
    if arguments.output:
        (arguments.output / "router_peers.md").write_text(printed + "\n", encoding="utf-8")
        (arguments.output / "router_peers.svg").write_text(plot(measured), encoding="utf-8")
