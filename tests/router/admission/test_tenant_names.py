"""Names that callers make up: an old tenant's share, quotas and memory beside a flood of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
from grpc import aio
from support.clock import ManualClock
from support.cluster.in_process import FAST_ROUTER, simulated
from support.eventually import eventually

from baton.connection.credentials import TENANT_KEY
from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, generate_pb2, inference_service_pb2_grpc
from discovery.memory import MemoryRegistry
from router.admission.fair_queue import FairQueue
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig, RouterConfig
from router.qos import IDLE_SECONDS, OTHERS, UnauthenticatedTenants
from router.server import Router, host_router
from rpc.channels import open_channel
from services.server import host_worker

CLAIMED = 4


def test_so_many_names_have_accounts_at_a_time_and_each_keeps_its_own_while_it_is_used() -> None:
    clock = ManualClock()
    names = UnauthenticatedTenants(CLAIMED, clock=clock)
    assert [names.has_account(f"t{number}") for number in range(6)] == [True] * 4 + [False] * 2
    clock.advance(IDLE_SECONDS - 1)
    assert names.has_account("t0")
    assert not names.has_account("late")
    clock.advance(1)
    assert names.has_account("late")
    assert names.has_account("t0")
    assert names.has_account("later")
    assert not names.has_account("t1") or not names.has_account("t2")


def test_names_of_the_configuration_and_callers_without_one_always_have_an_account() -> None:
    names = UnauthenticatedTenants(1, known=("acme",), clock=ManualClock())
    assert names.has_account("made up")
    assert not names.has_account("made up, too")
    assert names.has_account("acme")
    assert names.has_account("")


def test_made_up_names_leave_nothing_in_the_table() -> None:
    clock = ManualClock()
    names = UnauthenticatedTenants(CLAIMED, clock=clock)
    for number in range(10_000):
        names.has_account(f"made up {number}")
        clock.advance(IDLE_SECONDS / 100)
    assert len(names._used_at) == CLAIMED


def test_work_that_other_routers_have_not_heard_of_is_told_of_a_bounded_number_of_names() -> None:
    """Without a worker nothing is told, and requests pass the queue to be refused."""
    queue = FairQueue("weighted", ManualClock())
    queue.is_shared = True
    for number in range(30_000):
        ticket = queue.ticket(f"made up {number}", 0, 10)
        queue.begin(ticket)
        queue.undo(ticket)
    assert len(queue._unsent) <= 10_000


@dataclass
class Serving:
    """A router with one place, and the tenants in the order in which their requests end."""

    router: Router
    stub: inference_service_pb2_grpc.InferenceServiceStub
    operators: cluster_service_pb2_grpc.ClusterServiceStub
    ended: list[str] = field(default_factory=list)
    sent: int = 0

    async def run(self, tenant: str, tokens: int = 2) -> None:
        self.sent += 1  # no two prompts begin alike: what is cached is no work
        request = generate_pb2.GenerateRequest(prompt=f"{self.sent:04d}" * 25, stopping={"max_tokens": tokens})
        async for _ in self.stub.Generate(request, timeout=60, metadata=((TENANT_KEY, tenant),)):
            pass
        self.ended.append(tenant)

    async def code(self, tenant: str) -> grpc.StatusCode:
        try:
            await self.run(tenant)
        except aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def serving(**sections: object) -> AsyncIterator[Serving]:
    config: RouterConfig = FAST_ROUTER.model_copy(update=sections)
    registry = MemoryRegistry("test")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(host_worker(simulated("w", "prefill", "decode"), registry))
        router = await stack.enter_async_context(host_router(config, registry))
        channel = await stack.enter_async_context(open_channel(router.address))
        await eventually(lambda: any(not worker.problem for worker in router.cluster.workers))
        yield Serving(
            router,
            inference_service_pb2_grpc.InferenceServiceStub(channel),
            cluster_service_pb2_grpc.ClusterServiceStub(channel),
        )


async def in_a_full_queue(serving: Serving, requests: Callable[[], list["asyncio.Task[None]"]]) -> None:
    """Runs requests that all wait before the first one begins."""
    first = asyncio.create_task(serving.run("first", tokens=100_000))
    admission = serving.router.path.admission
    await eventually(lambda: any(queue.running for queue in admission.queues))
    running = requests()
    await eventually(lambda: sum(queue.waiting for queue in admission.queues) == len(running))
    first.cancel()
    await asyncio.gather(*running)


async def test_a_flood_of_made_up_names_keeps_no_old_tenant_waiting() -> None:
    admission = AdmissionConfig(max_running_per_worker=1, fairness="weighted", unauthenticated_tenants=CLAIMED)
    async with serving(admission=admission) as router:
        await router.run("old")

        def requests() -> list["asyncio.Task[None]"]:
            old = [asyncio.create_task(router.run("old")) for _ in range(4)]
            return old + [asyncio.create_task(router.run(f"made up {number}")) for number in range(60)]

        await in_a_full_queue(router, requests)
        last = max(index for index, tenant in enumerate(router.ended) if tenant == "old")
        before = sum(tenant != "old" for tenant in router.ended[:last])
        # Those with an account, and as many of all others as of the old tenant.
        assert before <= CLAIMED + 5, " ".join(router.ended)
        answer = await router.operators.ListTenants(cluster_service_pb2.ListTenantsRequest())
        assert OTHERS in {usage.tenant for usage in answer.tenants}


async def test_made_up_names_get_a_bounded_number_of_quotas() -> None:
    quotas = QuotasConfig(
        default=QuotaConfig(requests_per_second=1e-4, burst_seconds=1e4), tenants={"acme": QuotaConfig()}
    )
    async with serving(quotas=quotas, admission=AdmissionConfig(unauthenticated_tenants=CLAIMED)) as router:
        codes = [await router.code(f"made up {number}") for number in range(20)]
        assert codes.count(grpc.StatusCode.OK) == CLAIMED + 1
        assert set(codes[CLAIMED + 1 :]) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert await router.code("acme") is grpc.StatusCode.OK
