"""What a request leaves behind for the garbage collector, however it ends: nothing."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.eventually import PATIENCE_SECONDS
from support.lifetimes import in_one_task

from benchmarks.leftovers.cluster import Cluster, running_cluster
from benchmarks.leftovers.outcomes import OUTCOMES, Clients, Outcome
from runtime.aio import timeout

REQUESTS = 4

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """A router and workers of each role on our own HTTP/2, in two processes."""
    async with in_one_task(running_cluster("http2")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grpcio_cluster() -> AsyncIterator[Cluster]:
    """The same on grpcio's server."""
    async with in_one_task(running_cluster("grpcio")) as running:
        yield running


async def send(outcome: Outcome, clients: Clients) -> None:
    ends = await asyncio.gather(*(outcome.act(clients) for _ in range(REQUESTS)))
    assert set(ends) <= outcome.right


async def cycles(cluster: Cluster, outcome: Outcome) -> list[str]:
    """The cycles that some requests with this outcome have left in the router, and in the workers."""
    async with timeout(PATIENCE_SECONDS):
        # What the first one makes lives on, such as caches.
        async with Clients(cluster) as clients:
            await send(outcome, clients)
        await cluster.settled()
        await cluster.ask("watch")
        async with Clients(cluster) as clients:
            await send(outcome, clients)
        await cluster.settled()
        (_, router), (_, workers) = await cluster.ask("garbage")
    return [*router, *workers]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.name)
async def test_a_request_leaves_no_cycle_in_the_router_and_none_in_the_workers(
    cluster: Cluster, outcome: Outcome
) -> None:
    assert await cycles(cluster, outcome) == []


@pytest.mark.parametrize(
    "outcome",
    [
        each
        for each in OUTCOMES
        if each.name in ("answered", "cancelled in decode", "refused: too long", "late in held")
    ],
    ids=lambda outcome: outcome.name,
)
async def test_on_grpcio_only_its_own_objects_are_left_in_cycles(grpcio_cluster: Cluster, outcome: Outcome) -> None:
    left = await cycles(grpcio_cluster, outcome)
    assert [cycle for cycle in left if "grpc._cython.cygrpc.__pyx_scope_struct" not in cycle] == []
