"""A request leaves nothing behind for the garbage collector, however it ends."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from support.eventually import PATIENCE_SECONDS
from support.lifetimes import in_one_task

from benchmarks.leftovers.cluster import Cluster, running_cluster
from benchmarks.leftovers.outcomes import OUTCOMES, Clients, Outcome
from runtime.aio import timeout

REQUESTS = 4
ON_GRPCIO = ("answered", "cancelled in decode", "refused: too long", "late in held")

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


async def send(outcomes: Sequence[Outcome], cluster: Cluster) -> None:
    """Some requests with each of the outcomes in turn, until nothing of them runs."""
    async with Clients(cluster) as clients:
        for outcome in outcomes:
            async with timeout(PATIENCE_SECONDS):
                statuses = await asyncio.gather(*(outcome.act(clients) for _ in range(REQUESTS)))
            assert set(statuses) <= outcome.right, outcome.name
    async with timeout(PATIENCE_SECONDS):
        await cluster.settled()


async def cycles(cluster: Cluster, outcomes: Sequence[Outcome]) -> list[str]:
    """The cycles that some requests with these outcomes have left in the router, and in the workers."""
    # What the first one makes lives on, such as caches.
    await send(outcomes, cluster)
    await cluster.ask("watch")
    await send(outcomes, cluster)
    (_, router), (_, workers) = await cluster.ask("garbage")
    return [*router, *workers]


async def by_outcome(cluster: Cluster, outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """The same, each outcome alone, for the message of a failure."""
    return {each.name: left for each in outcomes if (left := await cycles(cluster, [each]))}


def ends(outcome: Outcome) -> str:
    """The first word of the name: `answered`, `cancelled`, `late`, ..."""
    return re.split("[ ,:]", outcome.name)[0]


@pytest.mark.parametrize("end", dict.fromkeys(map(ends, OUTCOMES)))
async def test_a_request_leaves_no_cycle_in_the_router_and_none_in_the_workers(cluster: Cluster, end: str) -> None:
    outcomes = [each for each in OUTCOMES if ends(each) == end]
    left = await cycles(cluster, outcomes)
    assert left == [], await by_outcome(cluster, outcomes)


async def test_on_grpcio_only_its_own_objects_are_left_in_cycles(grpcio_cluster: Cluster) -> None:
    outcomes = [each for each in OUTCOMES if each.name in ON_GRPCIO]
    left = await cycles(grpcio_cluster, outcomes)
    assert [cycle for cycle in left if "grpc._cython.cygrpc.__pyx_scope_struct" not in cycle] == []
