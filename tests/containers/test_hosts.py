"""Faults of hosts: every process in a container of its own, disturbed while streams run.

The bars are those of the matrix of faults: no stream fails, none loses, repeats or changes a token, and no block of KV
stays in use. `prefill-1` and `decode-1` are on one host, and share memory; all others meet by tcp.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from baton import AsyncClient, BatonError
from baton.errors import Unavailable
from baton.inference.v1.cluster_service_pb2 import WORKER_STATE_READY, Worker
from baton.inference.v1.generate_pb2 import TOPOLOGY_DISAGGREGATED, GenerateRequest
from baton.inference.v1.timing_pb2 import STAGE_HANDOFF_TRANSFER
from tools.containers.engine import Engine
from tools.containers.hosts import DIRECTIONS, FAKETIME, Cluster, open_cluster

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
STREAMS = 4
TOKENS = 100
# Of streams that must not end before a disturbance: half a minute.
ENDLESS = 1500
DEADLINE_SECONDS = 90.0
READY_SECONDS = 180.0
# A worker with the simulated engine has about 60 MB.
LIMIT = ("--memory", "384m")
# Each pair of roles that calls one another.
PAIRS = [
    ("decode-0", "router"),
    ("decode-0", "prefill-0"),
    ("prefill-0", "router"),
    ("decode-0", "etcd"),
    ("prefill-0", "etcd"),
    ("router", "etcd"),
]


@pytest.fixture(scope="module")
def cluster(engine: Engine) -> Iterator[Cluster]:
    with open_cluster(engine) as opened:
        opened.add_etcd()
        opened.add_router()
        for name in WORKERS[:3]:
            opened.add_worker(name)
        opened.add_worker("decode-1", *opened.beside("prefill-1"), *LIMIT)
        yield opened


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    """A client of the router, once every worker is ready. After the test all are ready again, without blocks in use."""
    async with AsyncClient(f"{cluster.hosts['router'].address()}:7070") as opened:
        await ready(cluster, opened, set(WORKERS))
        yield opened
        await nothing_held(cluster, opened)


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


async def nothing_held(cluster: Cluster, client: AsyncClient) -> None:
    """Waits until no worker has a block in use: leases of lost handoffs expire first."""
    used: dict[str, int] = {}
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        found = await ready(cluster, client, set(WORKERS))
        used = {name: each.load.blocks_used for name, each in found.items()}
        if not any(used.values()):
            return
        await asyncio.sleep(0.5)
    raise AssertionError(f"blocks still in use: {used}")


async def answer(client: AsyncClient, number: int, begun: asyncio.Event, tokens: int) -> str:
    text = ""
    stream = client.generate(f"Prompt {number}", max_tokens=tokens, seed=number, timeout_seconds=DEADLINE_SECONDS)
    async for event in stream:
        text += event.token.text
        if text:
            begun.set()
    return text


async def answers(client: AsyncClient, disturb: Callable[[], object] | None = None, tokens: int = TOKENS) -> list[str]:
    """The answers to all prompts; the disturbance comes once every stream has begun."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(answer(client, number, event, tokens)) for number, event in enumerate(begun)]
    if disturb is not None:
        # A stream that fails before it begins shall be seen as that failure.
        await asyncio.wait([asyncio.create_task(event.wait()) for event in begun], timeout=DEADLINE_SECONDS)
        await asyncio.to_thread(disturb)
    return await asyncio.gather(*tasks)


@pytest_asyncio.fixture
async def expected(client: AsyncClient) -> list[str]:
    return await answers(client)


@pytest.mark.parametrize("name", ["decode-0", "prefill-0", "etcd"])
async def test_a_killed_host_costs_no_token(
    cluster: Cluster, client: AsyncClient, expected: list[str], name: str
) -> None:
    host = cluster.hosts[name]
    try:
        assert await answers(client, host.kill) == expected
        assert await answers(client) == expected
    finally:
        host.start()


@pytest.mark.parametrize("name", ["decode-0", "prefill-0", "etcd"])
async def test_a_paused_host_costs_no_token(
    cluster: Cluster, client: AsyncClient, expected: list[str], name: str
) -> None:
    host = cluster.hosts[name]
    try:
        assert await answers(client, host.pause) == expected
        assert await answers(client) == expected
    finally:
        host.resume()


async def test_a_killed_router_ends_its_streams_with_an_error_and_leaves_no_block_in_use(
    cluster: Cluster, client: AsyncClient, expected: list[str]
) -> None:
    router = cluster.hosts["router"]
    try:
        with pytest.raises(Unavailable):
            await answers(client, router.kill, ENDLESS)
    finally:
        router.start()
    await ready(cluster, client, set(WORKERS))
    assert await answers(client) == expected


async def test_a_host_with_two_workers_costs_no_token(
    cluster: Cluster, client: AsyncClient, expected: list[str]
) -> None:
    prefill, decode = cluster.hosts["prefill-1"], cluster.hosts["decode-1"]
    try:
        assert await answers(client, prefill.kill) == expected
        # Its process was in the namespace of the other, as on a host that lost its power.
        assert not decode.is_running()
    finally:
        prefill.start()
        decode.start()


async def test_workers_of_one_host_hand_over_by_shared_memory_and_others_by_tcp(
    cluster: Cluster, client: AsyncClient
) -> None:
    found: dict[tuple[str, str], str] = {}
    deadline = time.monotonic() + DEADLINE_SECONDS
    for number in itertools.count():
        prefill, decode, transport = await handed_over(client, number)
        found[prefill, decode] = transport
        if len(found) == 4:
            break
        assert time.monotonic() < deadline, found
    assert found == {
        ("prefill-0", "decode-0"): "tcp",
        ("prefill-0", "decode-1"): "tcp",
        ("prefill-1", "decode-0"): "tcp",
        ("prefill-1", "decode-1"): "shm",
    }


async def handed_over(client: AsyncClient, number: int) -> tuple[str, str, str]:
    """The workers of a request, and how its KV came from one to the other."""
    request = GenerateRequest(prompt="Sort these words, please: pear apple mango")
    request.stopping.max_tokens = 2
    request.routing.session_key = f"session-{number}"
    # So that no cache has any of it.
    request.routing.cache_salt = f"salt-{number}"
    # Else a prompt that cannot be handed over would be run whole; so the test ends with the reason.
    request.routing.topology = TOPOLOGY_DISAGGREGATED
    stream = client.generate(request, timeout_seconds=DEADLINE_SECONDS)
    (finished,) = [event.finished async for event in stream if event.WhichOneof("event") == "finished"]
    transports = [each.transport for each in finished.timings if each.stage == STAGE_HANDOFF_TRANSFER]
    return finished.prefill_worker_id, finished.decode_worker_id, ",".join(transports)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("one", "other"), PAIRS)
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


async def test_a_host_out_of_memory_costs_no_token(cluster: Cluster, client: AsyncClient, expected: list[str]) -> None:
    host = cluster.hosts["decode-1"]
    try:
        assert await answers(client, host.exceed_memory) == expected
        assert not host.is_running()
        # By SIGKILL, which only the kernel sent.
        assert host.exit_code() == 137
    finally:
        host.start()


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
