"""The two ranks of a tensor-parallel worker, each in its own container: registration, answers, and how they end."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest
import pytest_asyncio
from support.clients.scraping import get_health, scrape
from support.eventually import eventually

from baton import AsyncClient
from baton.inference.v1.cluster_service_pb2 import WORKER_STATE_READY
from discovery.etcd.config import EtcdConfig
from discovery.etcd.registry import EtcdRegistry
from tools.containers.engine import Engine
from tools.containers.hosts import DIRECTIONS, METRICS_PORT, Cluster, Host, open_cluster

LOST_SECONDS = 10
LEASE_SECONDS = 10
# Beyond those two: what processes that share two cores take to do it.
MARGIN_SECONDS = 30
READY_SECONDS = 180.0


@pytest.fixture(scope="module")
def cluster(engine: Engine) -> Iterator[Cluster]:
    with open_cluster(engine) as opened:
        opened.add_etcd()
        opened.add_router()
        yield opened


@pytest_asyncio.fixture
async def ranks(cluster: Cluster) -> AsyncIterator[tuple[Host, Host]]:
    """Both ranks, whose group is registered: they start again after their end, and meet again."""
    if "rank-0" not in cluster.hosts:
        await start_one_after_the_other(cluster)
    found = cluster.hosts["rank-0"], cluster.hosts["rank-1"]
    for host in found:
        if not host.is_running():
            host.start()
    await until_registered(cluster, {"rank-0"}, READY_SECONDS)
    yield found


async def start_one_after_the_other(cluster: Cluster) -> None:
    """Starts rank 0, which is not registered while it waits for the other, and then that one."""
    first = cluster.add_rank(0, LOST_SECONDS)
    await eventually(lambda: "waiting for the other ranks" in first.logs(), READY_SECONDS)
    assert await registered(cluster) == set()
    second = cluster.add_rank(1, LOST_SECONDS)
    await eventually(lambda: "a rank has joined" in first.logs(), READY_SECONDS)
    await until_registered(cluster, {"rank-0"}, READY_SECONDS)
    assert "the group is ready" in second.logs()


async def registered(cluster: Cluster) -> set[str]:
    """The ids of the workers in etcd."""
    etcd = EtcdConfig(endpoints=(f"{cluster.hosts['etcd'].address()}:2379",))
    async with EtcdRegistry(etcd, "default") as registry, aclosing(registry.watch()) as views:
        return {record.worker_id for record in await asyncio.wait_for(anext(views), READY_SECONDS)}


async def until_registered(cluster: Cluster, names: set[str], seconds: float) -> None:
    """Waits until exactly these are in etcd."""
    deadline = time.monotonic() + seconds
    while (found := await registered(cluster)) != names:
        logs = "\n".join(host.logs() for name, host in cluster.hosts.items() if name.startswith("rank-"))
        assert time.monotonic() < deadline, f"registered: {sorted(found)}\n{logs}"
        await asyncio.sleep(0.5)


async def until_ended(cluster: Cluster, *hosts: Host) -> None:
    """Waits until nothing is registered, and these have ended by themselves, as they do when they lose another rank."""
    started = time.monotonic()
    await until_registered(cluster, set(), LOST_SECONDS + LEASE_SECONDS + MARGIN_SECONDS)
    print(f"\nregistered for {time.monotonic() - started:.1f} s afterwards", end="")
    await eventually(lambda: not any(host.is_running() for host in hosts), LOST_SECONDS + MARGIN_SECONDS)
    assert {host.exit_code() for host in hosts} == {1}


def monitor(host: Host) -> str:
    return f"{host.address()}:{METRICS_PORT}"


async def test_a_group_answers_and_only_rank_0_is_registered(cluster: Cluster, ranks: tuple[Host, Host]) -> None:
    second = monitor(ranks[1])
    before = scrape(second).sum("baton_rank_steps_total")
    async with AsyncClient(f"{cluster.hosts['router'].address()}:7070") as client:
        assert await ready(client) == ["rank-0"]
        text = await client.generate("Sort: pear apple mango", timeout_seconds=READY_SECONDS).text()
    assert text.strip() == "apple mango pear"
    # Without rank 1 there is no answer: it computed each step.
    assert scrape(second).sum("baton_rank_steps_total") > before
    assert await registered(cluster) == {"rank-0"}


async def ready(client: AsyncClient) -> list[str]:
    """The workers that the router knows, once one is ready."""
    deadline = time.monotonic() + READY_SECONDS
    found = await client.workers()
    while not any(each.state == WORKER_STATE_READY for each in found):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.5)
        found = await client.workers()
    return [each.worker_id for each in found]


async def test_rank_1_serves_health_and_metrics(ranks: tuple[Host, Host]) -> None:
    second = monitor(ranks[1])
    status, health = get_health(second)
    assert (status, health["status"], health["worker_id"]) == (200, "SERVING", "rank-1")
    scraped = scrape(second)
    assert scraped.has("baton_rank_info", rank="1", size="2", leader="rank-0:29500", model="demo")
    assert scraped.sum("baton_rank_ready") == 1


@pytest.mark.parametrize("killed", [1, 0])
async def test_killing_a_rank_ends_the_registration_and_the_other_rank(
    cluster: Cluster, ranks: tuple[Host, Host], killed: int
) -> None:
    ranks[killed].kill()
    await until_ended(cluster, ranks[1 - killed])


@pytest.mark.parametrize("directions", [DIRECTIONS, *((each,) for each in DIRECTIONS)], ids="-".join)
async def test_a_rank_that_is_cut_off_ends_the_registration_and_both_ranks(
    cluster: Cluster, ranks: tuple[Host, Host], directions: tuple[str, ...]
) -> None:
    first, second = ranks
    # The rules end with the container, as its network does.
    for direction in directions:
        second.cut(direction, first)
    await until_ended(cluster, first, second)
    assert f"it has been silent for {LOST_SECONDS} s" in first.logs() + second.logs()


async def test_a_drained_group_ends_with_exit_code_0(cluster: Cluster, ranks: tuple[Host, Host]) -> None:
    first, second = ranks
    assert await asyncio.to_thread(first.stop) == 0
    await eventually(lambda: not second.is_running(), MARGIN_SECONDS)
    assert second.exit_code() == 0
    assert await registered(cluster) == set()
