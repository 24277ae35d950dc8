"""Two routers of one fleet: quotas, places and tenants together, by real calls."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from support.cluster.in_process import FAST_ROUTER, simulated
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.connection.credentials import TENANT_KEY
from baton.engine.v1 import peer_pb2, peer_pb2_grpc
from baton.errors import QuotaExceeded
from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, generate_pb2, inference_service_pb2_grpc
from discovery.memory import MemoryRegistry
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig, RecordsConfig, RouterConfig
from router.server import Router, host_router
from rpc.channels import open_channel
from runtime.aio import timeout
from services.server import Worker, host_worker


@dataclass
class Pair:
    """The routers of one registry, and their worker."""

    registry: MemoryRegistry
    routers: list[Router]
    stubs: list[inference_service_pb2_grpc.InferenceServiceStub]
    operators: list[cluster_service_pb2_grpc.ClusterServiceStub]
    worker: Worker

    async def run(self, router: int, tenant: str, prompt: str = "x", tokens: int = 2) -> None:
        request = generate_pb2.GenerateRequest(prompt=prompt, stopping={"max_tokens": tokens})
        async for _ in self.stubs[router].Generate(request, timeout=60, metadata=((TENANT_KEY, tenant),)):
            pass

    async def run_when_it_may(self, router: int, tenant: str, **fields: object) -> None:
        """Runs one that is within the quota: a lender begins with an empty bucket."""
        async with timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await self.run(router, tenant, **fields)  # type: ignore[arg-type]
                    return
                except aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                await asyncio.sleep(0.1)

    async def refusal(self, router: int, tenant: str, **fields: object) -> aio.AioRpcError:
        """The first one: a router may accept a few requests before it is told what their tenant owes."""
        async with timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await self.run(router, tenant, **fields)  # type: ignore[arg-type]
                except aio.AioRpcError as error:
                    return error
                await asyncio.sleep(0.1)


@asynccontextmanager
async def pair(router: RouterConfig, **engine: object) -> AsyncIterator[Pair]:
    registry = MemoryRegistry("test")
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(host_worker(simulated("w", "prefill", "decode", **engine), registry))
        routers = [await stack.enter_async_context(host_router(router, registry)) for _ in range(2)]
        channels = [await stack.enter_async_context(open_channel(each.address)) for each in routers]
        await eventually(lambda: all(_ready(each) for each in routers) and len(registry.routers.workers()) == 2)
        yield Pair(
            registry,
            routers,
            [inference_service_pb2_grpc.InferenceServiceStub(channel) for channel in channels],
            [cluster_service_pb2_grpc.ClusterServiceStub(channel) for channel in channels],
            worker,
        )


def _ready(router: Router) -> bool:
    return any(not worker.problem for worker in router.cluster.workers)


def with_quota(**quota: float) -> RouterConfig:
    quotas = QuotasConfig(default=QuotaConfig(**quota))  # type: ignore[arg-type]
    return FAST_ROUTER.model_copy(update={"quotas": quotas})


async def accepted(attempt: Callable[[], object]) -> int:
    """The number of fifty requests that were within the quota."""
    count = 0
    for _ in range(50):
        try:
            await attempt()  # type: ignore[misc]
            count += 1
        except aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
    return count


async def test_two_routers_give_a_tenant_one_quota_and_not_two() -> None:
    async with pair(with_quota(requests_per_second=0.5, burst_seconds=10)) as fleet:
        began = asyncio.get_running_loop().time()
        # A home begins with an empty bucket: what the home before it has lent is unknown.
        await fleet.run_when_it_may(0, "acme")
        counts = await asyncio.gather(
            *(accepted(lambda router=router: fleet.run(router, "acme")) for router in range(2))  # type: ignore[misc]
        )
        seconds = asyncio.get_running_loop().time() - began
        assert 1 + sum(counts) <= 5 + 0.5 * seconds + 1


async def test_a_refusal_names_the_tenant_and_when_to_come_back_at_either_router() -> None:
    async with pair(with_quota(tokens_per_second=10, burst_seconds=1)) as fleet:
        for router in range(2):
            # Half a minute's worth: it is owed for longer than a busy machine takes to tell.
            await fleet.run_when_it_may(router, f"owes {router}", prompt="x" * 8, tokens=300)
            for asked in range(2):
                delay = 0.0
                while delay <= 1.0:  # what an answer used is told a little later
                    error = await fleet.refusal(asked, f"owes {router}", prompt="y" * 8)
                    details = _details(error)
                    assert details.quota.violations[0].subject == f"owes {router}"
                    delay = details.retry.retry_delay.ToNanoseconds() / 1e9
                    await asyncio.sleep(0.05)
                assert delay < 60.0


async def test_two_routers_do_not_overfill_a_worker_and_use_all_of_it() -> None:
    admission = AdmissionConfig(max_running_per_worker=4)
    config = FAST_ROUTER.model_copy(update={"admission": admission})
    async with pair(config, decode_step_seconds=0.01) as fleet:
        most = 0
        async with timeout(PATIENCE_SECONDS):
            while most < 3:  # at first the home lends no more than it is told of
                running = asyncio.gather(*(fleet.run(number % 2, "acme", tokens=20) for number in range(40)))
                while not running.done():
                    load = fleet.worker.engines.load()
                    most = max(most, load.running + load.waiting)
                    await asyncio.sleep(0.002)
                await running
                assert most <= 4


async def test_tenants_of_both_routers_are_listed_together_by_either() -> None:
    admission = AdmissionConfig(max_running_per_worker=64, fairness="weighted")
    quotas = QuotasConfig(tenants={"big": QuotaConfig(tokens_per_second=1000)})
    config = FAST_ROUTER.model_copy(update={"admission": admission, "quotas": quotas})
    async with pair(config) as fleet:
        for router in range(2):
            await fleet.run_when_it_may(router, "big", prompt="x" * 100, tokens=50)
            await fleet.run(router, "small", prompt="x" * 10, tokens=5)
        for operators in fleet.operators:
            answer = await operators.ListTenants(cluster_service_pb2.ListTenantsRequest())
            listed = {usage.tenant: usage for usage in answer.tenants}
            assert not answer.missing_routers
            assert list(listed)[:2] == ["big", "small"]
            assert listed["big"].recent_work == pytest.approx(2 * (100 + 4 * 50), rel=0.3)
            assert listed["big"].share + listed["small"].share == pytest.approx(1.0)
            assert listed["big"].HasField("tokens_left")
            assert not listed["small"].HasField("tokens_left")


async def test_strangers_borrow_nothing_and_what_no_router_asks_is_refused() -> None:
    async with pair(with_quota(tokens_per_second=1000)) as fleet:
        address = fleet.registry.routers.workers()[0].address
        async with open_channel(address) as channel:
            stub = peer_pb2_grpc.PeerServiceStub(channel)
            ask = peer_pb2.QuotaAsk(tenant="acme", tokens=1, more_tokens=1e9)
            answer = await stub.Lend(peer_pb2.LendRequest(router_id="stranger", quotas=[ask]))
            assert answer.quotas[0].not_home
            assert not answer.quotas[0].granted
            own = fleet.registry.routers.workers()[1].worker_id
            for wrong in (math.nan, -1.0, math.inf, 2.0**60):
                bad = peer_pb2.QuotaAsk(tenant="acme", tokens=wrong)
                with pytest.raises(aio.AioRpcError) as caught:
                    await stub.Lend(peer_pb2.LendRequest(router_id=own, quotas=[bad]))
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(aio.AioRpcError) as caught:
                await stub.Lend(peer_pb2.LendRequest(router_id=own, quotas=[ask] * 2000))
            assert "quotas" in (caught.value.details() or "")


async def test_a_router_that_shares_records_alone_is_no_home_and_lends_nothing() -> None:
    """It has no quotas: as a home it would grant what the others refuse."""
    recording = FAST_ROUTER.model_copy(update={"records": RecordsConfig(asked=True)})
    registry = MemoryRegistry("test")
    worker = simulated("w", "prefill", "decode")
    configs = (with_quota(requests_per_second=0.1, burst_seconds=10), recording, recording, recording)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(host_worker(worker, registry))
        routers = [await stack.enter_async_context(host_router(config, registry)) for config in configs]
        await eventually(lambda: all(len(_links(each)) == 3 for each in routers) and _ready(routers[0]))
        channel = await stack.enter_async_context(open_channel(routers[0].address))
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        for tenant in ("acme", "umbrella", "initech", "hooli"):
            metadata = ((TENANT_KEY, tenant),)
            request = generate_pb2.GenerateRequest(prompt="x", stopping={"max_tokens": 2})
            asked = generate_pb2.GenerateUnaryRequest(request=request)
            await unary(stub.GenerateUnary(asked, metadata=metadata))
            with pytest.raises(QuotaExceeded):
                await unary(stub.GenerateUnary(asked, metadata=metadata))


def _links(router: Router) -> list[object]:
    return list(router.path.peers.links) if router.path.peers is not None else []


async def test_a_router_without_quotas_and_limits_is_in_no_fleet() -> None:
    registry = MemoryRegistry("test")
    async with host_router(FAST_ROUTER, registry):
        assert not registry.routers.workers()


@dataclass
class _Details:
    quota: error_details_pb2.QuotaFailure
    retry: error_details_pb2.RetryInfo


def _details(error: aio.AioRpcError) -> _Details:
    wire = next(value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin")
    found = _Details(error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo())
    for packed in status_pb2.Status.FromString(wire).details:
        packed.Unpack(found.quota)
        packed.Unpack(found.retry)
    return found
