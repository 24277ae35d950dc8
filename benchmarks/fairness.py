"""Fairness between tenants: two routers, one decode worker of 16 places, clients that send more than it can serve.

Workers (the simulated engine) and routers are processes of their own, which find each other by a registry in a folder;
each request goes to one router or the other at random. Prompts and answers are log-normal. It prints, with
`admission.fairness` none and weighted:

    light          p99 and median time to the first token of a tenant that sends 7 % of the capacity, alone and beside
                   one that sends twenty times as much, and the work of both together
    two shapes     the larger by the smaller work in each 10 s of two backlogged tenants, long prompts and long answers
    late           what a tenant that comes later gets, of the early one's work
    quota          what two routers let pass of a quota whose demand is three times as much

    python -m benchmarks.fairness [--seconds 60]

Work is that of the queue: prompt tokens and four times the answer's, counted as the client gets them.
"""

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from grpc import aio

from baton.connection.credentials import TENANT_KEY
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.processes import child, received, run_process, until_told
from discovery.config import RegistryConfig
from router.config import AdmissionConfig, Fairness, ProbeConfig, QuotaConfig, QuotasConfig, RouterConfig
from router.server import host_router
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

Stub = inference_service_pb2_grpc.InferenceServiceStub

PLACES = 16  # more would measure the cores of a small machine
PREFILLS = 6  # so that prompts hardly wait for each other: that would be another queue than the router's
STEP_SECONDS = 0.024
CAPACITY = PLACES / (40 * STEP_SECONDS * 1.2)  # requests a second of 40 tokens (median): 14, as many places get free
SLICE = 10.0


@dataclass(frozen=True)
class Load:
    """A tenant's requests: how many a second, their tokens (medians), from when on."""

    rate: float
    prompt: int = 2000
    answer: int = 40
    begins: float = 0.0


@dataclass
class Got:
    """What a tenant got: its times to the first token, and its work by slices."""

    first_tokens: list[float] = field(default_factory=list)
    work: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    refused: int = 0
    answer_tokens: list[int] = field(default_factory=list)

    def quantile(self, part: float) -> float:
        ordered = sorted(self.first_tokens)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else math.nan


def run_workers(pipe: Connection, folder: Path) -> None:
    """Serves the prefill workers and a decode worker until the pipe ends."""

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for name, role in (*((f"p{number}", "prefill") for number in range(PREFILLS)), ("d1", "decode")):
                await stack.enter_async_context(host_worker(_worker(name, role, folder)))
            pipe.send(True)
            await until_told(pipe)

    run_process(serve)


def _worker(name: str, role: str, folder: Path) -> WorkerConfig:
    return WorkerConfig(
        worker_id=name,
        roles=(role,),  # type: ignore[arg-type]
        registry=RegistryConfig(kind="file", folder=folder),
        engine=SimulatedConfig(
            num_blocks=65_536,
            block_bytes=64,
            max_batch=2 * PLACES,
            prefill_tokens_per_second=40_000.0,
            decode_step_seconds=STEP_SECONDS,
        ),
        transports=("shm",),
        drain_seconds=0,
    )


def run_router(pipe: Connection, config: RouterConfig) -> None:
    """Routes until the pipe ends. Sends its address once all workers are ready."""

    async def serve() -> None:
        async with host_router(config) as router:
            while sum(not worker.problem for worker in router.cluster.workers) <= PREFILLS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pipe.send(router.address)
            await until_told(pipe)

    run_process(serve)


class Clients:
    """The clients of all tenants, at both routers.

    Each tenant has connections of its own: a router takes `max_streams` calls of one connection, 256 as it comes, and
    those of a flood that wait would keep another tenant's calls in its client.
    """

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._chance = random.Random(7)
        self._number = 0

    async def run(self, loads: Mapping[str, Load], seconds: float) -> dict[str, Got]:
        """What each tenant got. What still waits at the end is cancelled."""
        got = {name: Got() for name in loads}
        async with AsyncExitStack() as stack:
            stubs = {name: [await stack.enter_async_context(_stub(to)) for to in self._addresses] for name in loads}
            began = time.monotonic()
            sending = [
                asyncio.create_task(self._send_all(tenant, load, stubs[tenant], got[tenant], began))
                for tenant, load in loads.items()
            ]
            await asyncio.sleep(seconds)
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
            await asyncio.sleep(2.0)
        return got

    async def _send_all(self, tenant: str, load: Load, stubs: list[Stub], got: Got, began: float) -> None:
        due, tasks = began + load.begins, set()
        try:
            while True:
                due += self._chance.expovariate(load.rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                task = asyncio.create_task(self._send(tenant, load, self._chance.choice(stubs), got, began))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, tenant: str, load: Load, stub: Stub, got: Got, began: float) -> None:
        prompt = max(16, int(self._chance.lognormvariate(math.log(load.prompt), 0.6)))
        self._number += 1
        request = generate_pb2.GenerateRequest(prompt=f"{self._number:08d}".ljust(prompt, "x"))
        request.stopping.max_tokens = max(4, int(self._chance.lognormvariate(math.log(load.answer), 0.6)))
        request.sampling.temperature = 0
        sent, is_first = time.monotonic(), True
        try:
            async for message in stub.Generate(request, timeout=600, metadata=((TENANT_KEY, tenant),)):
                tokens = len(message.token.token_ids)
                got.answer_tokens.append(tokens)
                now = time.monotonic()
                if tokens and is_first:
                    is_first = False
                    got.first_tokens.append(now - sent)
                    got.work[int((now - began) // SLICE)] += prompt
                got.work[int((now - began) // SLICE)] += 4 * tokens
        except aio.AioRpcError:
            got.refused += 1


@asynccontextmanager
async def fleet(fairness: Fairness, quotas: QuotasConfig | None = None) -> AsyncIterator[Clients]:
    """Two routers and the workers, three processes, and their clients."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers, _ = await stack.enter_async_context(child(run_workers, folder))
        await received(workers)
        config = RouterConfig(
            listen="127.0.0.1:0",
            drain_seconds=0,
            registry=RegistryConfig(kind="file", folder=folder),
            probe=ProbeConfig(timeout_seconds=20, hung_seconds=60),
            quotas=quotas or QuotasConfig(),
            admission=AdmissionConfig(
                max_running_per_worker=0 if quotas else PLACES, max_waiting=100_000, fairness=fairness
            ),
        )
        addresses = []
        for _ in range(2):
            router, _ = await stack.enter_async_context(child(run_router, config))
            addresses.append(await received(router))
        await asyncio.sleep(3.0)  # until the home of the places lends more than it is told of
        yield Clients(addresses)


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[Stub]:
    async with open_channel(address, replaced_options={"grpc.use_local_subchannel_pool": 1}) as channel:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)


def _ratios(one: Got, other: Got, slices: range) -> list[float]:
    pairs = [sorted((one.work[at], other.work[at])) for at in slices]
    return sorted(most / max(1.0, least) for least, most in pairs)


async def measure_light(seconds: float) -> None:
    light, flood = Load(CAPACITY * 0.07), Load(CAPACITY * 1.4)
    async with fleet("weighted") as clients:
        alone = (await clients.run({"light": light}, seconds))["light"]
    print(f"{len(alone.first_tokens)} requests alone, in {seconds:.0f} s")
    print("| queue | light alone: p50, p99 | beside 20 x: p50, p99 | p99 beside by alone | work/s of both |")
    print("|---|---|---|---|---|")
    for fairness in ("weighted", "none"):
        async with fleet(fairness) as clients:  # type: ignore[arg-type]
            got = await clients.run({"light": light, "flood": flood}, seconds + 20)
        beside, total = got["light"], sum(sum(one.work.values()) for one in got.values()) / (seconds + 20)
        print(
            f"| {fairness} | {alone.quantile(0.5):.3f}, {alone.quantile(0.99):.3f} s | {beside.quantile(0.5):.3f}, "
            f"{beside.quantile(0.99):.3f} s | {beside.quantile(0.99) / alone.quantile(0.99):.2f} | {total:.0f} |",
            flush=True,
        )


async def measure_shapes(seconds: float) -> None:
    tenants = {"long": Load(CAPACITY * 0.4, 6000, 10), "chat": Load(CAPACITY * 1.5, 300, 60)}
    for fairness in ("none", "weighted"):
        async with fleet(fairness) as clients:  # type: ignore[arg-type]
            got = await clients.run(tenants, seconds + 20)
        ratios = _ratios(got["long"], got["chat"], range(2, int(seconds + 20) // 10))
        print(
            f"two shapes, {fairness}: larger by smaller work in 10 s: median {ratios[len(ratios) // 2]:.2f}, "
            f"p95 {ratios[int(0.95 * len(ratios))]:.2f}, worst {ratios[-1]:.2f} of {len(ratios)}",
            flush=True,
        )


async def measure_late(seconds: float) -> None:
    begins = float(int(seconds) // 10 * 10)
    tenants = {"early": Load(CAPACITY * 1.2), "late": Load(CAPACITY * 1.2, begins=begins)}
    for fairness in ("none", "weighted"):
        async with fleet(fairness) as clients:  # type: ignore[arg-type]
            got = await clients.run(tenants, begins + 40)
        slices = range(int(begins) // 10 + 1, int(begins) // 10 + 4)
        late, early = (sum(got[name].work[at] for at in slices) for name in ("late", "early"))
        part = late / max(1.0, early)
        print(f"late by {begins:.0f} s, {fairness}: gets {part:.2f} of the early one's work", flush=True)


async def measure_quota(seconds: float) -> None:
    quota = QuotaConfig(tokens_per_second=2000.0, burst_seconds=5.0)
    async with fleet("none", QuotasConfig(default=quota)) as clients:
        await asyncio.sleep(5.0)
        got = (await clients.run({"acme": Load(30.0, 200, 1)}, seconds))["acme"]
    answers = sum(got.answer_tokens)
    used = sum(got.work.values()) - 3 * answers
    bound = quota.tokens_per_second * (seconds + quota.burst_seconds)
    print(f"quota: {used:.0f} tokens in {seconds:.0f} s of at most {bound:.0f} ({used / bound:.3f})")


MEASUREMENTS = {"light": measure_light, "shapes": measure_shapes, "late": measure_late, "quota": measure_quota}


async def run(names: Sequence[str], seconds: float) -> None:
    for name in names:
        await MEASUREMENTS[name](seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement, more of those under a flood")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    arguments = parser.parse_args()
    asyncio.run(run(arguments.only, arguments.seconds))


if __name__ == "__main__":
    main()
