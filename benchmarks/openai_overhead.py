"""The router's CPU time for each streamed message: OpenAI's API over HTTP beside gRPC, on the same router.

    python benchmarks/openai_overhead.py [--output FILE] [--streams 64] [--rounds 3]

Three processes: simulated workers, the router, and this one, which is the client. The workers pace their tokens, so
that each token is a message of its own. Loads alternate between gRPC and HTTP; CPU time is of the router's process
alone, from /proc. "Per message" is what a stream of 128 tokens costs above a request for one token, divided by the
messages; the ratio is of one run's medians.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.processes import child, cpu_nanoseconds, received, run_process, until_told
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.config import OpenAIConfig, RouterConfig
from router.server import host_router
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

TOKENS = 128
STEP_SECONDS = 0.02
PROMPT = "the quick brown fox"

# Reads one answer of so many tokens, and returns the number of its messages with text.
Ask = Callable[[int], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Load:
    """What a load cost the router."""

    nanoseconds: int
    messages: int
    requests: int


def run_workers(pipe: Connection) -> None:
    """Serves both roles until the pipe ends."""

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for role in ("prefill", "decode"):
                engine = SimulatedConfig(
                    name="demo", num_blocks=16384, block_bytes=64, decode_step_seconds=STEP_SECONDS
                )
                config = WorkerConfig(worker_id=role, roles=(role,), engine=engine, transports=("shm",))  # type: ignore[arg-type]
                await stack.enter_async_context(host_worker(config, registry))
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


def run_router(pipe: Connection, server: str) -> None:
    """A router to the workers whose records arrive first through the pipe, until it ends."""

    async def serve() -> None:
        config = RouterConfig(
            listen="127.0.0.1:0",
            server=server,  # type: ignore[arg-type]
            openai=OpenAIConfig(listen="127.0.0.1:0"),
            metrics_listen="127.0.0.1:0",
            drain_seconds=0,
        )
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for record in pipe.recv():
                await stack.enter_async_context(registry.register(record))
            router = await stack.enter_async_context(host_router(config, registry))
            while sum(not worker.problem for worker in router.cluster.workers) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pipe.send((router.address, router.openai_address))
            await until_told(pipe)

    run_process(serve)


def over_grpc(stub: inference_service_pb2_grpc.InferenceServiceStub) -> Ask:
    async def ask(tokens: int) -> int:
        request = generate_pb2.GenerateRequest(prompt=PROMPT)
        request.stopping.max_tokens = tokens
        return len([one async for one in stub.Generate(request) if one.HasField("token")])

    return ask


def over_http(address: str) -> Ask:
    host, _, port = address.rpartition(":")

    async def ask(tokens: int) -> int:
        body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        # All but the last two events, the finish and [DONE].
        count = sum([1 async for line in _lines(reader) if line.startswith(b"data: {")]) - 1
        writer.close()
        return count

    return ask


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line


async def load(ask: Ask, pid: int, streams: int, tokens: int) -> Load:
    before = cpu_nanoseconds(pid)
    messages = sum(await asyncio.gather(*(ask(tokens) for _ in range(streams))))
    return Load(cpu_nanoseconds(pid) - before, messages, streams)


async def per_message(ask: Ask, pid: int, streams: int) -> tuple[float, float]:
    """Microseconds of a message, and of a request for one token."""
    short = await load(ask, pid, streams, 1)
    request = short.nanoseconds / short.requests
    long = await load(ask, pid, streams, TOKENS)
    return (long.nanoseconds - request * streams) / (long.messages - streams) / 1e3, request / 1e3


async def measure(server: str, streams: int, rounds: int) -> list[str]:
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        router, pid = await stack.enter_async_context(child(run_router, server))
        records: Sequence[WorkerRecord] = await received(workers)
        router.send(records)
        address, http = await received(router)
        channel = await stack.enter_async_context(open_channel(address))
        ways = {"gRPC": over_grpc(inference_service_pb2_grpc.InferenceServiceStub(channel)), "HTTP": over_http(http)}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, ask in ways.items():
                result = await per_message(ask, pid, streams)
                if number:  # the first one warms up
                    found[name].append(result)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    (message, request), (grpc_message, grpc_request) = medians["HTTP"], medians["gRPC"]
    cells = [server, f"{grpc_message:.1f}", f"{message:.1f}", f"{message / grpc_message:.2f}"]
    cells += [f"{grpc_request:.0f}", f"{request:.0f}", f"{request / grpc_request:.2f}"]
    return ["| " + " | ".join(cells) + " |"]


HEADER = (
    "| gRPC server | us/message gRPC | us/message HTTP | ratio | us/request gRPC | us/request HTTP | ratio |\n"
    "|---|---|---|---|---|---|---|"
)


async def run(arguments: argparse.Namespace) -> str:
    rows = [row for server in arguments.servers for row in await measure(server, arguments.streams, arguments.rounds)]
    return "\n".join([HEADER, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", nargs="+", default=["grpcio", "http2"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    table = uvloop.run(run(arguments))
    print(table)
    if arguments.output:
        arguments.output.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
