"""The cost of the router: CPU time for each token and request, time to first token, and tokens for each message.

    python benchmarks/router_overhead.py [--output FILE] [--streams 64 256] [--requests 2000]

Three processes: simulated workers, the router, and this one, which is the client. CPU time is user and system time
of the router's process alone, from /proc. "Per token" is all of it divided by the tokens, including requests.
Prompts are texts of 512 tokens that differ, so they are tokenized, prefilled on one worker and decoded on another.
Added time to first token is the difference between a request through the router and a direct Prefill call.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

from baton.engine.v1 import prefill_pb2, prefill_pb2_grpc, prompt_pb2
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.processes import child, received, routing, run_process, until_told
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.config import RouterConfig, RoutingConfig
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

PROMPT_TOKENS = 512
TOKENS = 128
TOKENS_PER_SECOND = 30
CONNECTIONS = 8  # of the client
PACED, FLAT = "paced", "flat"
# Every prompt is prefilled on one worker and decoded on another, whatever that would gain.
SEPARATE = RoutingConfig(policy="least_loaded")


@dataclass
class Load:
    """A client's measurements during one load, and the router's CPU time for it."""

    name: str
    tokens: int = 0
    messages: int = 0
    requests: int = 0
    seconds: float = 0.0
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)

    @property
    def cpu_seconds(self) -> float:
        return self.user_seconds + self.system_seconds


def run_workers(pipe: Connection) -> None:
    """Serves each role of each model until the pipe ends."""

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for model, step_seconds in ((PACED, 1 / TOKENS_PER_SECOND), (FLAT, 0.0)):
                for role in ("prefill", "decode"):
                    config = worker_config(model, role, step_seconds if role == "decode" else 0.0)
                    await stack.enter_async_context(host_worker(config, registry))
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


def run_router(pipe: Connection) -> None:
    """A router to the workers whose records arrive first through the pipe, until it ends."""

    async def serve() -> None:
        config = RouterConfig(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", drain_seconds=0, routing=SEPARATE)
        async with routing(config, pipe.recv()) as address:
            pipe.send(address)
            await until_told(pipe)

    run_process(serve)


def worker_config(model: str, role: str, step_seconds: float) -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{model}-{role}",
        roles=(role,),  # type: ignore[arg-type]
        engine=SimulatedConfig(
            name=model,
            num_blocks=65536,
            block_bytes=64,
            decode_step_seconds=step_seconds,
            max_context_tokens=1024,
            max_batch=1024,
        ),
        transports=("shm",),
        drain_seconds=0,
    )


class Client:
    """Sends loads through several connections, and reads the router's CPU time before and after."""

    def __init__(self, address: str, router_pid: int, prefill_address: str) -> None:
        self._channels = [open_channel(address) for _ in range(CONNECTIONS)]
        self._stubs = [inference_service_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._prefill_channel = open_channel(prefill_address)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._prefill_channel)
        self._router_pid = router_pid
        self._prompts = prompts()

    async def close(self) -> None:
        for channel in [*self._channels, self._prefill_channel]:
            await channel.close()

    async def streams(self, name: str, model: str, streams: int) -> Load:
        """Streams of many tokens that start within one second."""
        load = Load(name)
        spread = 1.0 / streams if model == PACED else 0.0
        await self._measure(load, [self._stream(load, model, TOKENS, index * spread) for index in range(streams)])
        return load

    async def requests(self, name: str, requests: int, concurrency: int) -> Load:
        """Requests for one token each, one after another in each of several lanes."""
        load = Load(name)
        concurrency = min(concurrency, requests)

        async def lane() -> None:
            for _ in range(requests // concurrency):
                await self._stream(load, FLAT, 1, 0.0)

        await self._measure(load, [lane() for _ in range(concurrency)])
        return load

    async def direct(self, streams: int) -> list[float]:
        """Times to first token of direct Prefill calls that start within one second. Their leases expire."""
        seconds: list[float] = []

        async def call(delay: float) -> None:
            await asyncio.sleep(delay)
            ids = next(self._prompts).encode()
            stop = prompt_pb2.StopConditions(max_tokens=1)
            request = prefill_pb2.PrefillRequest(
                request_id=f"direct-{time.monotonic_ns()}",
                model=PACED,
                prompt=prompt_pb2.Prompt(token_ids=ids),
                sampling=prompt_pb2.Sampling(stop=stop),
            )
            started = time.perf_counter()
            await self._prefill.Prefill(request)
            seconds.append(time.perf_counter() - started)

        await asyncio.gather(*(call(index / streams) for index in range(streams)))
        return seconds

    async def _measure(self, load: Load, work: Sequence[Awaitable[None]]) -> None:
        user, system = cpu_seconds(self._router_pid)
        started = time.perf_counter()
        await asyncio.gather(*work)
        load.seconds = time.perf_counter() - started
        user_after, system_after = cpu_seconds(self._router_pid)
        load.user_seconds, load.system_seconds = user_after - user, system_after - system

    async def _stream(self, load: Load, model: str, tokens: int, delay: float) -> None:
        await asyncio.sleep(delay)
        request = generate_pb2.GenerateRequest(model=model, prompt=next(self._prompts))
        request.stopping.max_tokens = tokens
        load.requests += 1
        started, first = time.perf_counter(), 0.0
        async for message in self._stubs[load.requests % CONNECTIONS].Generate(request):
            if message.HasField("token"):
                first = first or time.perf_counter() - started
                load.tokens += len(message.token.token_ids)
                load.messages += 1
        load.first_token_seconds.append(first)


def prompts(first: int = 0) -> Iterator[str]:
    """Texts of 512 bytes, which are tokens here, without common prefixes, numbered from `first` on."""
    for number in count(first):
        yield f"{number:08d} {'the quick brown fox jumps over the lazy dog ' * 12}"[:PROMPT_TOKENS]


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


async def measure(client: Client, streams: Sequence[int], requests: int) -> list[str]:
    await client.requests("warm-up", 256, 64)
    one_token = await client.requests("1-token requests, 64 at a time", requests, 64)
    per_request = one_token.cpu_seconds / one_token.requests
    rows = [row(one_token, None, 0.0)]
    for number in streams:
        direct = await client.direct(number)
        rows.append(
            row(await client.streams(f"{number} streams, 30 tokens/s each", PACED, number), direct, per_request)
        )
        rows.append(row(await client.streams(f"{number} streams, flat out", FLAT, number), None, per_request))
    return rows


def row(load: Load, direct: list[float] | None, per_request: float) -> str:
    """One line of the table, with the added time to first token if direct calls were timed in the same load."""
    p50, p99 = quantiles(load.first_token_seconds)
    plain = quantiles(direct) if direct else None
    own = load.cpu_seconds - per_request * load.requests if per_request else 0.0
    cells = [
        load.name,
        f"{load.cpu_seconds / load.requests * 1e6:.0f}",
        f"{load.cpu_seconds / load.tokens * 1e6:.1f}",
        f"{own / load.tokens * 1e6:.1f}" if per_request else "",
        f"{load.system_seconds / load.cpu_seconds:.2f}",
        f"{load.cpu_seconds / load.seconds:.2f}",
        f"{load.tokens / load.messages:.2f}",
        f"{p50 * 1e3:.1f} / {p99 * 1e3:.1f}",
        f"{(p50 - plain[0]) * 1e3:.1f} / {(p99 - plain[1]) * 1e3:.1f}" if plain else "",
    ]
    return "| " + " | ".join(cells) + " |"


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


HEADER = (
    "| load | CPU us/request | CPU us/token | less the requests | in kernel | cores | tokens/message "
    "| TTFT ms p50 / p99 | added ms |\n|---|---|---|---|---|---|---|---|---|"
)


async def run(arguments: argparse.Namespace) -> str:
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        router, pid = await stack.enter_async_context(child(run_router))
        records: Sequence[WorkerRecord] = await received(workers)
        router.send(records)
        prefill = next(record.address for record in records if record.worker_id == f"{PACED}-prefill")
        client = Client(await received(router), pid, prefill)
        stack.push_async_callback(client.close)
        rows = await measure(client, arguments.streams, arguments.requests)
    return "\n".join([HEADER, *rows])


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    table = uvloop.run(run(arguments))
    print(table)
    if arguments.output:
        arguments.output.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
