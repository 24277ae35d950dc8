"""The accuracy of timings: `python -m benchmarks.telemetry.timings [--requests 1000] [--engine simulated]`.

A thousand requests of all kinds (new and cached prompts, new and cached pictures, whole on one worker) to the
demonstration model on an encode, a prefill and a decode worker behind a router: half of them one after the other, half
by 16 users of 4 clients, who pause before each request; and 300 more by 16 users who never pause, which is more
than a router can take. Compared are the sum of the stages up to the first token, and the time from the request's send
until the first token has reached the client's socket, by the kernel's clock: a client that waits for a core, or for
Python, is no part of it. It prints how many are exact (a difference of at most 2 % or 2 ms), the differences in
milliseconds, the unattributed part of the timings, and how long the client then took to read. The thousand decide.

Everything runs in separate processes. The timings exclude the network, and, on a machine with fewer cores than
processes, the wait of a router that has not yet read the request for a core.
"""

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from PIL import Image

from baton.inference.v1 import generate_pb2, media_pb2, timing_pb2
from benchmarks.processes import child, received, run_process, run_router, until_told
from benchmarks.router_overhead import ROUTER
from benchmarks.telemetry.stamped_call import Stamped, StampedConnection
from discovery.memory import MemoryRegistry
from engine_protocol.roles import Role
from services.config import EncodeConfig, WorkerConfig
from services.engines.context import EngineConfig
from services.engines.pytorch.config import PyTorchConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
ROLES: tuple[Role, ...] = ("encode", "prefill", "decode")
ONE, USERS, FLOOD = "1 at a time", "16 users", "16 without a pause"
PAUSE_SECONDS = 0.2  # on average
FLOOD_REQUESTS = 300
CLIENTS = 4
MAX_TOKENS = 8
WITHIN_SHARE, WITHIN_SECONDS = 0.02, 0.002
STORY = "Once upon a time Mia and the fox went to the lake. " * 8
PICTURE_SIDE = 64

# About what the demonstration model takes on one core, without taking it.
SIMULATED = SimulatedConfig(
    name="demo",
    model=str(MODEL),
    image_tokens=16,
    num_blocks=16384,
    encode_seconds=0.008,
    prefill_base_seconds=0.003,
    prefill_tokens_per_second=10_000,
    decode_step_seconds=0.005,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: the time to first token by the client, and by the timings. In seconds."""

    kind: str
    way: str
    client: float  # until the first token has reached the client's socket
    reading: float  # from there until the client has read it, which is no part of the former
    timings: float
    unattributed: float

    @property
    def residual(self) -> float:
        """The time that the timings do not explain."""
        return self.client - self.timings

    @property
    def is_exact(self) -> bool:
        return abs(self.residual) <= max(WITHIN_SECONDS, WITHIN_SHARE * self.client)


@dataclass(frozen=True, slots=True)
class Load:
    """A client's load: `count` requests from the `first` kind on, `abreast` of them at a time."""

    address: str
    first: int
    count: int
    abreast: int
    way: str


def run_worker(pipe: Connection) -> None:
    """A worker with the role and engine that arrive first through the pipe, until it ends."""

    async def serve() -> None:
        role, engine = pipe.recv()
        registry = MemoryRegistry("benchmark")
        encode = EncodeConfig(inline_bytes=0)  # so that embeddings are pulled
        config = WorkerConfig(worker_id=role, roles=(role,), engine=engine, encode=encode, drain_seconds=0)
        async with host_worker(config, registry):
            pipe.send(registry.workers()[0])
            await until_told(pipe)

    os.environ["OMP_NUM_THREADS"] = "1"
    run_process(serve)


def text(
    prompt: str, topology: generate_pb2.Topology.ValueType = generate_pb2.TOPOLOGY_ANY
) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(prompt=prompt, routing={"topology": topology})
    request.stopping.max_tokens = MAX_TOKENS
    return request


def about(picture: bytes) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest()
    message = request.chat.messages.add(role="user")
    message.parts.add(media=media_pb2.MediaItem(data=picture, modality=media_pb2.MODALITY_IMAGE))
    message.parts.add(text="What is in the picture?")
    request.stopping.max_tokens = MAX_TOKENS
    return request


def picture(number: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE), (number % 256, number // 256 % 256, 90)).save(file, "PNG")
    return file.getvalue()


def requests() -> Iterator[tuple[str, generate_pb2.GenerateRequest]]:
    """All kinds in turn, forever."""
    for number in itertools.count():
        yield "new prompt", text(f"{number} children {STORY}")
        yield "cached prompt", text(STORY)
        yield "whole", text(f"{number} foxes {STORY}", generate_pb2.TOPOLOGY_AGGREGATED)
        yield "short prompt", text(f"{number} is")
        yield "new picture", about(picture(number))
        yield "cached picture", about(picture(0))


def ask(connection: StampedConnection, kind: str, request: generate_pb2.GenerateRequest, way: str) -> Seen:
    started = connection.begin(request)
    first: Stamped | None = None
    for each in connection.answer():
        if first is None and each.message.token.token_ids:
            first = each
    timings = each.message.finished.timings
    before = {timing.stage: timing.before_first_token.ToNanoseconds() / 1e9 for timing in timings}
    assert first is not None
    return Seen(
        kind,
        way,
        client=(first.arrived - started) / 1e9,
        reading=(first.read - first.arrived) / 1e9,
        timings=sum(before.values()),
        unattributed=before[timing_pb2.STAGE_UNATTRIBUTED],
    )


def run_client(pipe: Connection) -> None:
    """Runs the loads that arrive through the pipe, and sends back the measurements."""
    while (load := pipe.recv()) != "stop":
        pipe.send(send(load))


def send(load: Load) -> list[Seen]:
    """Sends a load's requests from threads, because a client should take little time itself."""
    # Each client starts elsewhere: kinds are always mixed, and numbers in prompts are unique.
    source = itertools.islice(requests(), load.first * 1001, load.first * 1001 + load.count)
    with ExitStack() as stack, ThreadPoolExecutor(load.abreast) as threads:
        idle: SimpleQueue[StampedConnection] = SimpleQueue()
        for _ in range(load.abreast):
            idle.put(stack.enter_context(StampedConnection(load.address)))

        def work(asked: tuple[str, generate_pb2.GenerateRequest]) -> Seen:
            if load.way == USERS:
                time.sleep(random.expovariate(1 / PAUSE_SECONDS))
            connection = idle.get(timeout=60)
            try:
                return ask(connection, *asked, load.way)
            finally:
                idle.put(connection)

        return list(threads.map(work, source))


async def spread(clients: Sequence[Connection], address: str, count: int, way: str) -> list[Seen]:
    """Divides a load equally among several clients."""
    abreast = 1 if way == ONE else 16
    active = clients[: min(abreast, len(clients))]
    for index, pipe in enumerate(active):
        pipe.send(Load(address, index, count // len(active), abreast // len(active), way))
    return [one for pipe in active for one in await asyncio.to_thread(pipe.recv)]


def quantiles(values: Sequence[float]) -> str:
    """The median and the extremes, in milliseconds."""
    cuts = statistics.quantiles(values, n=100)
    return " / ".join(f"{1e3 * value:6.2f}" for value in (cuts[0], cuts[49], cuts[94], cuts[98], max(values)))


def report(name: str, seen: Sequence[Seen]) -> str:
    share = sum(each.is_exact for each in seen) / len(seen)
    client = statistics.median(each.client for each in seen)
    spread_of = [
        quantiles([getattr(each, field) for each in seen]) for field in ("residual", "unattributed", "reading")
    ]
    cells = [name, str(len(seen)), f"{share:.1%}", f"{client * 1e3:.1f}", *spread_of]
    return f"| {' | '.join(cells)} |"


async def run(count: int, engine: EngineConfig) -> bool:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(child(run_worker)) for _ in ROLES]
        for (pipe, _), role in zip(workers, ROLES, strict=True):
            pipe.send((role, engine))
        records = [await received(pipe) for pipe, _ in workers]
        router, _ = await stack.enter_async_context(child(run_router, ROUTER))
        router.send(records)
        address = await received(router)
        clients = [(await stack.enter_async_context(child(run_client)))[0] for _ in range(CLIENTS)]
        await spread(clients, address, 96, FLOOD)  # warms everything up
        seen = [one for way in (ONE, USERS) for one in await spread(clients, address, count // 2, way)]
        flood = await spread(clients, address, FLOOD_REQUESTS, FLOOD)
    print(
        "| requests | number | exact | client's TTFT | residual p1 / p50 / p95 / p99 / max | unattributed, the same "
        "| the client reads it, the same |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, chosen in groups(seen, flood):
        print(report(name, chosen))
    return sum(one.is_exact for one in seen) >= 0.99 * len(seen)


def groups(seen: Sequence[Seen], flood: Sequence[Seen]) -> Iterator[tuple[str, Sequence[Seen]]]:
    yield f"all {len(seen)}", seen
    for way in (ONE, USERS):
        yield way, [one for one in seen if one.way == way]
    for kind in sorted({one.kind for one in seen}):
        yield kind, [one for one in seen if one.kind == kind]
    yield FLOOD, flood


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--engine", choices=("pytorch", "simulated"), default="pytorch")
    arguments = parser.parse_args()
    random.seed(1)
    engines: dict[str, EngineConfig] = {
        "pytorch": PyTorchConfig(model=MODEL, name="demo", device="cpu", threads=1),
        "simulated": SIMULATED,
    }
    raise SystemExit(0 if asyncio.run(run(arguments.requests, engines[arguments.engine])) else 1)


if __name__ == "__main__":
    main()
