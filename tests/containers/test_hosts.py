"""Faults of hosts: every process in a container of its own, disturbed while streams run.

The bars are those of the matrix of faults: no stream fails, and none loses, repeats or changes a token.
"""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from baton import AsyncClient, BatonError
from baton.inference.v1.cluster_service_pb2 import WORKER_STATE_READY, Worker
from tools.containers.engine import Engine
from tools.containers.hosts import DIRECTIONS, FAKETIME, Cluster, Host, open_cluster

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
STREAMS = 4
TOKENS = 100
DEADLINE_SECONDS = 90.0
READY_SECONDS = 180.0
# A worker with the simulated engine has about 60 MB.
LIMIT_MEGABYTES, TAKEN_MEGABYTES, ROOMY_MEGABYTES = 96, 40, 1024


@pytest.fixture(scope="module")
def cluster(engine: Engine) -> Iterator[Cluster]:
    with open_cluster(engine) as opened:
        opened.add_etcd()
        opened.add_router()
        for name in WORKERS:
            opened.add_worker(name)
        yield opened


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    """A client of the router, once every worker is ready."""
    async with AsyncClient(f"{cluster.hosts['router'].address()}:7070") as opened:
        await ready(cluster, opened, set(WORKERS))
        yield opened


async def ready(cluster: Cluster, client: AsyncClient, names: set[str]) -> dict[str, Worker]:
    """The workers, once exactly these are ready."""
    found: dict[str, Worker] = {}
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            found = {each.worker_id: each for each in await client.workers() if each.state == WORKER_STATE_READY}
        except BatonError:
            found = {}
        if set(found) == names:
            return found
        await asyncio.sleep(0.5)
    missing = "\n".join(cluster.hosts[name].logs() for name in names - set(found) if name in cluster.hosts)
    raise AssertionError(f"ready: {sorted(found)}; missing:\n{missing}")


async def answer(client: AsyncClient, number: int, begun: asyncio.Event) -> str:
    text = ""
    stream = client.generate(f"Prompt {number}", max_tokens=TOKENS, seed=number, timeout_seconds=DEADLINE_SECONDS)
    async for event in stream:
        text += event.token.text
        if text:
            begun.set()
    return text


async def answers(client: AsyncClient, disturb: Callable[[], object] | None = None) -> list[str]:
    """The answers to all prompts; the disturbance comes once every stream has begun."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(answer(client, number, event)) for number, event in enumerate(begun)]
    if disturb is not None:
        # A stream that fails before it begins shall be seen as that failure.
        await asyncio.wait([asyncio.create_task(event.wait()) for event in begun], timeout=DEADLINE_SECONDS)
        await asyncio.to_thread(disturb)
    return await asyncio.gather(*tasks)


@pytest_asyncio.fixture
async def expected(client: AsyncClient) -> list[str]:
    return await answers(client)


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_killed_host_costs_no_token(
    cluster: Cluster, client: AsyncClient, expected: list[str], name: str
) -> None:
    host = cluster.hosts[name]
    assert await answers(client, host.kill) == expected
    host.start()


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_paused_host_costs_no_token(
    cluster: Cluster, client: AsyncClient, expected: list[str], name: str
) -> None:
    host = cluster.hosts[name]
    try:
        assert await answers(client, host.pause) == expected
    finally:
        host.resume()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("one", "other"), [("decode-0", "router"), ("decode-0", "prefill-0"), ("prefill-0", "router"), ("decode-0", "etcd")]
)
async def test_a_pair_cut_off_in_one_direction_costs_no_token(
    cluster: Cluster, client: AsyncClient, expected: list[str], one: str, other: str, direction: str
) -> None:
    first, second = cluster.hosts[one], cluster.hosts[other]
    try:
        assert await answers(client, lambda: first.cut(direction, second)) == expected
        # New streams too, whose handoffs would cross the cut.
        assert await answers(client) == expected
    finally:
        first.mend(direction, second)


async def test_a_host_out_of_memory_costs_no_token(
    cluster: Cluster, client: AsyncClient, expected: list[str], engine: Engine
) -> None:
    host = cluster.hosts["decode-1"]
    assert await answers(client, lambda: fill_memory(engine, host)) == expected
    assert not host.is_running()
    host.limit_memory(ROOMY_MEGABYTES)
    host.start()


def fill_memory(engine: Engine, host: Host) -> None:
    """Lowers the limit to little more than the process has; a second one takes the rest, and the larger one ends."""
    host.limit_memory(LIMIT_MEGABYTES)
    eat = f"taken = [bytearray(b'x' * 2**20) for _ in range({TAKEN_MEGABYTES})]; import time; time.sleep(60)"
    command = engine.command("exec", host.container, "python", "-c", eat)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=engine.environment
    ) as eater:
        deadline = time.monotonic() + READY_SECONDS
        while host.is_running() and time.monotonic() < deadline:
            time.sleep(0.2)
        eater.kill()


async def test_an_address_that_changes_is_found_by_its_name(
    cluster: Cluster, client: AsyncClient, expected: list[str]
) -> None:
    host = cluster.hosts["decode-0"]
    before = host.address()
    await asyncio.to_thread(host.move)
    await ready(cluster, client, set(WORKERS))
    assert host.address() != before
    assert await answers(client) == expected


async def test_workers_are_registered_by_the_names_of_their_hosts(cluster: Cluster, client: AsyncClient) -> None:
    found = await ready(cluster, client, set(WORKERS))
    assert {worker.address for worker in found.values()} == {f"{name}:7070" for name in WORKERS}


async def test_a_router_answers_at_its_ipv6_address(cluster: Cluster, expected: list[str]) -> None:
    async with AsyncClient(f"[{cluster.hosts['router'].address_v6()}]:7070") as client:
        assert await answers(client) == expected


async def test_a_full_disk_under_etcd_costs_no_token(
    cluster: Cluster, client: AsyncClient, expected: list[str], engine: Engine
) -> None:
    container = cluster.hosts["etcd"].container
    fill = ("exec", container, "sh", "-c", "dd if=/dev/zero of=/data/full bs=1M count=200 2>/dev/null || true")
    try:
        assert await answers(client, lambda: engine.run(*fill)) == expected
        assert await answers(client) == expected
    finally:
        engine.run("exec", container, "rm", "-f", "/data/full")


@pytest.mark.skipif(not FAKETIME.is_file(), reason="a clock of its own needs Debian's package libfaketime")
async def test_a_host_whose_clock_is_an_hour_ahead_serves(cluster: Cluster, client: AsyncClient) -> None:
    expected = await answers(client)
    clock = ("--volume", f"{FAKETIME}:/faketime.so:ro", "--env", "LD_PRELOAD=/faketime.so", "--env", "FAKETIME=+1h")
    ahead = cluster.add_worker("decode-2", *clock, "--env", "FAKETIME_DONT_FAKE_MONOTONIC=1")
    kept = ["decode-0", "decode-1"]
    try:
        for name in kept:
            assert cluster.hosts[name].stop() == 0
        await ready(cluster, client, {"prefill-0", "prefill-1", "decode-2"})
        assert await answers(client) == expected
    finally:
        assert ahead.stop() == 0
        for name in kept:
            cluster.hosts[name].start()
