"""A router of the fleet that answers what no router may: the others go on by themselves, with bounded advice."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
from grpc import aio
from support.cluster.in_process import FAST_ROUTER, simulated
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.connection.credentials import TENANT_KEY
from baton.engine.v1 import peer_pb2, peer_pb2_grpc
from baton.error_details import from_rpc_error
from baton.errors import QuotaExceeded, QuotaUnavailable
from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    generate_pb2,
    inference_service_pb2_grpc,
    record_pb2,
)
from discovery.memory import MemoryRegistry
from router.admission.places import key_of
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig, RecordsConfig
from router.peers.membership import RegisteredPeers
from router.server import host_router
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import Service, serve
from runtime.aio import timeout
from services.server import host_worker

ROUTER = FAST_ROUTER.model_copy(
    update={
        "quotas": QuotasConfig(default=QuotaConfig(requests_per_second=1000.0, tokens_per_second=100_000.0)),
        "admission": AdmissionConfig(max_running_per_worker=8, fairness="weighted"),
        "records": RecordsConfig(asked=True),
    }
)


@dataclass
class Liar(peer_pb2_grpc.PeerServiceServicer):
    """A router that answers whatever a test says; `asked` are the methods that were called."""

    lend: Callable[[peer_pb2.LendRequest], peer_pb2.LendResponse] = lambda _: peer_pb2.LendResponse()
    tenants: peer_pb2.ListOwnTenantsResponse = field(default_factory=peer_pb2.ListOwnTenantsResponse)
    records: peer_pb2.FindRecordsResponse = field(default_factory=peer_pb2.FindRecordsResponse)
    asked: set[str] = field(default_factory=set)

    async def Lend(self, request: peer_pb2.LendRequest, context: Any) -> peer_pb2.LendResponse:
        self.asked |= {"quotas"} if request.quotas else set()
        self.asked |= {"places"} if request.places else set()
        return self.lend(request)

    async def Promise(self, request: peer_pb2.PromiseRequest, context: Any) -> peer_pb2.PromiseResponse:
        # It takes part, and supports no router: where it is the first one, its loans are the only ones.
        return peer_pb2.PromiseResponse(knows_caller=True)

    async def ListOwnTenants(self, request: Any, context: Any) -> peer_pb2.ListOwnTenantsResponse:
        return self.tenants

    async def FindRecords(self, request: Any, context: Any) -> peer_pb2.FindRecordsResponse:
        return self.records


@dataclass
class Beside:
    """A router beside the one that lies."""

    liar: str
    peers: RegisteredPeers
    end_liar: Callable[[], Awaitable[None]]  # takes its record back
    stub: inference_service_pb2_grpc.InferenceServiceStub
    operators: cluster_service_pb2_grpc.ClusterServiceStub

    async def run(self, tenant: str) -> int:
        request = generate_pb2.GenerateRequest(prompt="x", stopping={"max_tokens": 2})
        call = self.stub.Generate(request, timeout=30, metadata=((TENANT_KEY, tenant),))
        return sum([len(message.token.token_ids) async for message in call])

    async def answered(self, tenant: str) -> None:
        """Asks until it is answered: with another lender a tenant begins with nothing."""
        async with timeout(PATIENCE_SECONDS):
            while True:
                try:
                    assert await self.run(tenant) == 2
                    return
                except aio.AioRpcError as error:
                    found = from_rpc_error(error)
                    assert isinstance(found, QuotaExceeded)
                    await asyncio.sleep(min(0.1, found.retry_after_seconds))

    async def ended(self, tenant: str) -> None:
        """Asks once: it is answered, or refused as the quota is exceeded or not lent."""
        try:
            await self.run(tenant)
        except aio.AioRpcError as error:
            found = from_rpc_error(error)
            if not isinstance(found, QuotaExceeded | QuotaUnavailable):
                raise found from error


@asynccontextmanager
async def beside(liar: Liar) -> AsyncIterator[Beside]:
    registry = MemoryRegistry("test")
    add = peer_pb2_grpc.add_PeerServiceServicer_to_server
    service = Service("baton.engine.v1.PeerService", add, liar)
    async with AsyncExitStack() as stack:
        serving = serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0)
        server = await stack.enter_async_context(serving)
        await stack.enter_async_context(host_worker(simulated("w", "prefill", "decode"), registry))
        router = await stack.enter_async_context(host_router(ROUTER, registry))
        await eventually(lambda: len(registry.routers.workers()) == 1)
        here, peers = registry.routers.workers()[0].location, router.path.peers
        assert peers is not None
        record = replace(peers.own, address=server.address, location=here)
        for number in count():
            # Until its id makes it the home of the model's places.
            named = replace(record, worker_id=f"liar-{number}")
            registration = await stack.enter_async_context(AsyncExitStack())
            await registration.enter_async_context(registry.routers.register(named))
            await eventually(lambda: peers.count == 2)
            if peers.home(key_of("demo", "decode")) == named.worker_id:
                break
            await registration.aclose()
            await eventually(lambda: peers.count == 1)
        channel = await stack.enter_async_context(open_channel(router.address))
        await eventually(lambda: any(not worker.problem for worker in router.cluster.workers))
        stubs = inference_service_pb2_grpc.InferenceServiceStub, cluster_service_pb2_grpc.ClusterServiceStub
        yield Beside(named.worker_id, peers, registration.aclose, stubs[0](channel), stubs[1](channel))


def _loans(request: peer_pb2.LendRequest, **loan: Any) -> peer_pb2.LendResponse:
    return peer_pb2.LendResponse(
        quotas=[peer_pb2.QuotaLoan(**loan) for _ in request.quotas],
        places=[peer_pb2.PlacesLoan(not_home=True) for _ in request.places],
    )


def _places(request: peer_pb2.LendRequest, **loan: Any) -> peer_pb2.LendResponse:
    return peer_pb2.LendResponse(
        quotas=[peer_pb2.QuotaLoan(granted=True) for _ in request.quotas],
        places=[peer_pb2.PlacesLoan(**loan) for _ in request.places],
    )


LENDING: dict[str, Callable[[peer_pb2.LendRequest], peer_pb2.LendResponse]] = {
    "nothing": lambda _: peer_pb2.LendResponse(),
    "more loans than asks": lambda _: peer_pb2.LendResponse(quotas=[peer_pb2.QuotaLoan(granted=True)] * 5000),
    "not a number": lambda request: _loans(request, granted=True, more_tokens=float("nan")),
    "less than nothing": lambda request: _loans(request, granted=True, more_requests=-1e300),
    "endless": lambda request: _loans(request, granted=True, more_tokens=float("inf")),
    "an unknown kind": lambda request: _loans(request, granted=True, exceeded=77),
    "endless places": lambda request: _places(request, places=2**32 - 1, contended=True),
    "counters": lambda request: _places(request, places=8, counters={"a": float("nan")}),
    "many counters": lambda request: _places(request, places=8, counters={f"t{n}": 1.0 for n in range(50_000)}),
}


LIMITED = [f"tenant {number}" for number in range(20)]


@pytest.mark.parametrize("name", LENDING)
async def test_whatever_a_home_lends_requests_are_answered(name: str) -> None:
    liar = Liar(LENDING[name])
    async with beside(liar) as running:
        await eventually(lambda: any(running.peers.lends_since(tenant) is not None for tenant in LIMITED))
        here = [tenant for tenant in LIMITED if running.peers.lends_since(tenant) is not None]
        there = [tenant for tenant in LIMITED if tenant not in here]
        await asyncio.gather(*map(running.answered, here), *map(running.ended, there))
        assert "quotas" in liar.asked
        async with timeout(PATIENCE_SECONDS):
            while "places" not in liar.asked:
                await running.answered(here[0])
        await running.end_liar()
        await eventually(lambda: all(running.peers.lends_since(tenant) is not None for tenant in there))
        await asyncio.gather(*map(running.answered, there))


@pytest.mark.parametrize("seconds", [2**62, -(2**62), 0])
async def test_the_time_that_a_home_says_to_come_back_after_is_bounded(seconds: int) -> None:
    liar = Liar(lambda request: _loans(request, retry_after={"seconds": seconds}, exceeded=77))
    async with beside(liar) as running:
        await eventually(lambda: any(running.peers.lends_since(tenant) is not None for tenant in LIMITED))
        there = [tenant for tenant in LIMITED if running.peers.lends_since(tenant) is None]
        assert there
        for tenant in there:
            with pytest.raises(aio.AioRpcError) as caught:
                await running.run(tenant)
            found = from_rpc_error(caught.value)
            assert isinstance(found, QuotaExceeded)
            assert 0 < found.retry_after_seconds <= 3600
            assert found.message == f"tenant {tenant}: the quota is exceeded"


TENANTS: dict[str, dict[str, Any]] = {
    "a long name": {"tenant": "x" * 2**20},
    "work that is no number": {"tenant": "acme", "recent_work": float("nan")},
    "endless work": {"tenant": "acme", "recent_work": float("inf")},
    "a quota that is no number": {"tenant": "acme", "tokens_left": float("nan")},
}


@pytest.mark.parametrize("name", TENANTS)
async def test_a_router_that_tells_wrongly_of_its_tenants_is_named_as_missing(name: str) -> None:
    tenants = peer_pb2.ListOwnTenantsResponse(tenants=[cluster_service_pb2.TenantUsage(**TENANTS[name])])
    async with beside(Liar(tenants=tenants)) as running:
        answer = await unary(running.operators.ListTenants(cluster_service_pb2.ListTenantsRequest(), timeout=20))
        assert answer.missing_routers == [running.liar]
        assert not answer.tenants


async def test_numbers_of_requests_that_no_message_can_tell_are_the_largest_that_one_can() -> None:
    usage = cluster_service_pb2.TenantUsage(
        tenant="acme", running=2**32 - 1, waiting=2**32 - 1, longest_wait={"seconds": 2**62}
    )
    async with beside(Liar(tenants=peer_pb2.ListOwnTenantsResponse(tenants=[usage, usage]))) as running:
        answer = await unary(running.operators.ListTenants(cluster_service_pb2.ListTenantsRequest(), timeout=20))
        assert [(one.running, one.waiting) for one in answer.tenants] == [(2**32 - 1, 2**32 - 1)]


async def test_records_of_other_requests_and_tenants_are_left_out() -> None:
    records = [{"request_id": "mine", "tenant": "other"}, {"request_id": "another"}, {"request_id": "mine"}]
    async with beside(Liar(records=peer_pb2.FindRecordsResponse(records=records))) as running:  # type: ignore[arg-type]
        found = await unary(running.stub.GetRecords(record_pb2.GetRecordsRequest(request_id="mine"), timeout=20))
        assert [(one.request_id, one.tenant) for one in found.records] == [("mine", "")]


async def test_a_record_of_a_newer_router_keeps_the_numbers_that_have_no_name_here() -> None:
    record = record_pb2.RequestRecord(request_id="mine", cause=77, answers=[{"reason": 77}])
    async with beside(Liar(records=peer_pb2.FindRecordsResponse(records=[record]))) as running:
        found = await unary(running.stub.GetRecords(record_pb2.GetRecordsRequest(request_id="mine"), timeout=20))
        assert [(one.cause, one.answers[0].reason) for one in found.records] == [(77, 77)]
