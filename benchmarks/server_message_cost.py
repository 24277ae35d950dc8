"""What a message that is served costs: `python -m benchmarks.server_message_cost`.

One servicer of InferenceService, behind the interceptors of every server, on grpc.aio's server and on our own, each in
a process of its own; a third one is ours again, with all messages of a step written at once, as the
tokens of an engine's step are. Streams of 30 messages a second each come over 8 connections of one client, which goes
from server to server, round after round. A message is a token's, made anew each time. What is printed is CPU time of
the server's process, all its threads: the median of the rounds, and as a ratio to grpc.aio's of the same rounds.
"""

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from grpc import aio

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import inference_service_pb2, inference_service_pb2_grpc
from baton_http2.server.reply import Wire
from benchmarks.processes import child, cpu_nanoseconds, received, run_process, until_told
from rpc.health import Health
from rpc.server import ServerKind, Service, serve

CONNECTIONS = 8
STEPS_PER_SECOND = 30
STREAMS = (64, 256)
REQUESTS = 2000
LANES = 64
ROUNDS = 5
SECONDS = 4.0
_NAME = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to serve."""

    name: str
    kind: ServerKind
    writes_at_once: bool = False


BASE = Candidate("grpc.aio", "grpcio")
CANDIDATES = (BASE, Candidate("http2", "http2"), Candidate("http2, a step at once", "http2", writes_at_once=True))


def message(sequence: int) -> pb.GenerateResponse:
    """A token's."""
    token = pb.TokenDelta(text=" word", token_ids=[sequence % 50_000])
    return pb.GenerateResponse(request_id="request-00000000", sequence=sequence, token=token)


class Engine(inference_service_pb2_grpc.InferenceServiceServicer):
    """Gives every stream a message at each step."""

    def __init__(self, *, writes_at_once: bool) -> None:
        self._writes_at_once = writes_at_once
        self._wires: dict[Any, Wire] = {}
        self._waiting: list[asyncio.Future[None]] = []

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        if request.stopping.max_tokens:
            await context.write(message(0))
        elif self._writes_at_once:
            await self._be_written_to(context)
        else:
            await self._write(context)

    async def _be_written_to(self, context: Any) -> None:
        wire = context.reply().open_wire()
        assert wire is not None
        self._wires[context] = wire
        context.add_done_callback(self._wires.pop)
        await asyncio.Event().wait()

    async def _write(self, context: Any) -> None:
        sequence = 0
        while True:
            step = asyncio.get_running_loop().create_future()
            self._waiting.append(step)
            await step
            await context.write(message(sequence))
            sequence += 1

    async def run(self) -> None:
        """Steps for as long as it is not cancelled."""
        loop = asyncio.get_running_loop()
        due, sequence = loop.time(), 0
        while True:
            due = max(due + 1 / STEPS_PER_SECOND, loop.time())
            await asyncio.sleep(due - loop.time())
            for wire in self._wires.values():
                wire.write(message(sequence).SerializeToString())
            sequence += 1
            waiting, self._waiting = self._waiting, []
            for step in waiting:
                if not step.done():
                    step.set_result(None)


def run_server(pipe: Connection, candidate: Candidate) -> None:
    """Serves until the pipe ends; says its address through it."""

    async def main() -> None:
        engine = Engine(writes_at_once=candidate.writes_at_once)
        add = inference_service_pb2_grpc.add_InferenceServiceServicer_to_server
        services = [Service(_NAME, add, engine)]
        async with serve("127.0.0.1:0", services, health=Health(), drain_seconds=0, kind=candidate.kind) as server:
            stepping = asyncio.create_task(engine.run())
            pipe.send(server.address)
            await until_told(pipe)
            stepping.cancel()

    run_process(main)


@dataclass(slots=True)
class Load:
    """A client of one server, and what each round of each load has cost that: microseconds of CPU a message."""

    candidate: Candidate
    pid: int
    generates: list[Callable[[bytes], Any]]
    costs: dict[str, list[float]] = field(default_factory=dict)

    async def paced(self, streams: int, seconds: float) -> None:
        """Streams that are read for `seconds`."""
        counts = [0] * streams

        async def read(index: int) -> None:
            async for _ in self.generates[index % CONNECTIONS](b""):
                counts[index] += 1

        tasks = [asyncio.create_task(read(index)) for index in range(streams)]
        await asyncio.sleep(0.5)
        before, count = cpu_nanoseconds(self.pid), sum(counts)
        await asyncio.sleep(seconds)
        cost = (cpu_nanoseconds(self.pid) - before) / max(1, sum(counts) - count) / 1000
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.costs.setdefault(f"{streams} streams, a message", []).append(cost)

    async def requests(self) -> None:
        """Calls of one message each."""
        request = pb.GenerateRequest(prompt="x" * 2000)
        request.stopping.max_tokens = 1
        wire = request.SerializeToString()

        async def lane(index: int) -> None:
            for _ in range(REQUESTS // LANES):
                async for _ in self.generates[index % CONNECTIONS](wire):
                    pass

        before = cpu_nanoseconds(self.pid)
        await asyncio.gather(*(lane(index) for index in range(LANES)))
        cost = (cpu_nanoseconds(self.pid) - before) / (REQUESTS // LANES * LANES) / 1000
        self.costs.setdefault(f"{LANES} at a time, a call", []).append(cost)


@asynccontextmanager
async def loaded(candidate: Candidate) -> AsyncIterator[Load]:
    """A server in a process of its own, and a client of it."""
    async with AsyncExitStack() as stack:
        pipe, pid = await stack.enter_async_context(child(run_server, candidate))
        address = await received(pipe)
        generates = []
        for index in range(CONNECTIONS):
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.channel_id", index))
            channel = await stack.enter_async_context(aio.insecure_channel(address, options=options))
            generates.append(channel.unary_stream(f"/{_NAME}/Generate"))
        yield Load(candidate, pid, generates)


async def main(rounds: int, seconds: float) -> None:
    async with AsyncExitStack() as stack:
        loads = [await stack.enter_async_context(loaded(candidate)) for candidate in CANDIDATES]
        for _ in range(rounds):
            for load in loads:
                await load.requests()
            for streams in STREAMS:
                for load in loads:
                    await load.paced(streams, seconds)
    show(loads)


def show(loads: list[Load]) -> None:
    """Prints a table."""
    base = next(load for load in loads if load.candidate is BASE)
    print("| load | server | us of CPU | least - most | ratio to grpc.aio |\n|---|---|---|---|---|")
    for name in base.costs:
        for load in loads:
            costs = load.costs[name]
            ratio = statistics.median(cost / other for cost, other in zip(costs, base.costs[name], strict=True))
            spread = f"{min(costs):.1f} - {max(costs):.1f}"
            print(f"| {name} | {load.candidate.name} | {statistics.median(costs):.1f} | {spread} | {ratio:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.rounds, arguments.seconds))
