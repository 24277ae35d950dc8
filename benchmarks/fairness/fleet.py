"""Two routers, prefill workers and a decode worker as processes, and clients that send more than it can serve.

They find each other by a registry in a folder, and each request goes to one router or the other at random.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from grpc import aio

from baton.connection.credentials import TENANT_KEY
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.fairness.loads import Got, Load, Sent, requests_of
from benchmarks.processes import child, received, run_process, until_told
from discovery.config import RegistryConfig
from router.config import AdmissionConfig, Fairness, ProbeConfig, QuotasConfig, RouterConfig
from router.server import host_router
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

Stub = inference_service_pb2_grpc.InferenceServiceStub

LEASE_SECONDS = 4.0
_HOME_SECONDS = 3.0  # until the home of the places lends more than it is told of


@dataclass(frozen=True)
class Engines:
    """The workers: prefill workers enough that prompts hardly wait for each other, which would be another queue."""

    places: int = 16  # more would measure the cores of a small machine
    prefills: int = 6
    step_seconds: float = 0.024
    prefill_tokens_per_second: float = 40_000.0


def run_workers(pipe: Connection, folder: Path, engines: Engines) -> None:
    """Serves the prefill workers and a decode worker until the pipe ends."""

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for name, role in (*((f"p{number}", "prefill") for number in range(engines.prefills)), ("d1", "decode")):
                await stack.enter_async_context(host_worker(_worker(name, role, folder, engines)))
            pipe.send(True)
            await until_told(pipe)

    run_process(serve)


def _worker(name: str, role: str, folder: Path, engines: Engines) -> WorkerConfig:
    return WorkerConfig(
        worker_id=name,
        roles=(role,),  # type: ignore[arg-type]
        registry=registry_of(folder),
        engine=SimulatedConfig(
            num_blocks=65_536,
            block_bytes=64,
            max_batch=max(256, 2 * engines.places),
            prefill_tokens_per_second=engines.prefill_tokens_per_second,
            decode_step_seconds=engines.step_seconds,
        ),
        transports=("shm",),
        drain_seconds=0,
    )


def registry_of(folder: Path) -> RegistryConfig:
    """The registry of a fleet."""
    return RegistryConfig(kind="file", folder=folder, lease_ttl_seconds=LEASE_SECONDS)


def run_router(pipe: Connection, config: RouterConfig, workers: int) -> None:
    """Routes until the pipe ends. Sends its address once all workers are ready."""

    async def serve() -> None:
        async with host_router(config) as router:
            while sum(not worker.problem for worker in router.cluster.workers) < workers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pipe.send(router.address)
            await until_told(pipe)

    run_process(serve)


def router_config(folder: Path, admission: AdmissionConfig, quotas: QuotasConfig | None = None) -> RouterConfig:
    """That of each router."""
    return RouterConfig(
        listen="127.0.0.1:0",
        drain_seconds=0,
        registry=registry_of(folder),
        probe=ProbeConfig(timeout_seconds=20, hung_seconds=60),
        quotas=quotas or QuotasConfig(),
        admission=admission,
    )


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
        """Returns the service of each tenant. Requests that still wait at the end are cancelled."""
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
        tasks = set()
        try:
            for sent in requests_of(load, f"{tenant} 7"):
                await asyncio.sleep(max(0.0, began + sent.at - time.monotonic()))
                stub = self._chance.choice(stubs)
                task = asyncio.create_task(self._send(tenant, load, sent, stub, got, began))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, tenant: str, load: Load, asked: Sent, stub: Stub, got: Got, began: float) -> None:
        self._number += 1
        request = generate_pb2.GenerateRequest(prompt=f"{self._number:08d}".ljust(asked.prompt, "x"))
        request.stopping.max_tokens = asked.answer
        request.sampling.temperature = 0
        request.response.min_tokens_per_message = load.grouped
        sent, is_first = time.monotonic(), True
        try:
            async for message in stub.Generate(request, timeout=600, metadata=((TENANT_KEY, tenant),)):
                now, tokens = time.monotonic(), len(message.token.token_ids)
                got.count(now - began, tokens, asked.prompt if tokens and is_first else 0)
                if tokens and is_first:
                    is_first = False
                    got.first_tokens.append(now - sent)
        except aio.AioRpcError:
            got.refused += 1


@asynccontextmanager
async def fleet(fairness: Fairness, engines: Engines = Engines()) -> AsyncIterator[Clients]:
    """Two routers and the workers, three processes, and their clients."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers, _ = await stack.enter_async_context(child(run_workers, folder, engines))
        await received(workers)
        admission = AdmissionConfig(
            max_running_per_worker=engines.places, max_waiting=100_000, fairness=fairness, predict_deadlines=False
        )
        addresses = []
        for _ in range(2):
            config = router_config(folder, admission)
            router, _ = await stack.enter_async_context(child(run_router, config, engines.prefills + 1))
            addresses.append(await received(router))
        await asyncio.sleep(_HOME_SECONDS)
        yield Clients(addresses)


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[Stub]:
    async with open_channel(address, replaced_options={"grpc.use_local_subchannel_pool": 1}) as channel:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)
