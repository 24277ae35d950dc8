"""Encode workers that are killed or hang during requests: requests go elsewhere, and no embedding stays held."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
import pytest
import pytest_asyncio
from support.clients.generation import Answer, generate
from support.cluster.fleet import Fleet, FleetPlan, overrides, shared_fleet
from support.eventually import PATIENCE_SECONDS
from support.images.pictures import picture
from support.servers.etcd import EtcdServer

from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from runtime.aio import timeout

# Many processes share two cores: slow is not wrong.
pytestmark = pytest.mark.timeout(400)

LEASE_SECONDS = 2.0
ENCODE_SECONDS = 0.5


@pytest.fixture(scope="module")
def whole(shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("lost-encoders")
    plan = FleetPlan(
        namespace=folder.name,
        etcd=shared_etcd.endpoint,
        worker=(
            *overrides("engine", {"kind": "simulated", "image_tokens": 16, "encode_seconds": ENCODE_SECONDS}),
            "encode.inline_bytes=0",
            f"handoff.lease_seconds={LEASE_SECONDS}",
        ),
        # Without a cache, whatever is held is held by a request.
        router=("embeddings.max_bytes=0", "probe.timeout_seconds=1"),
        encode=2,
        prefill=1,
        decode=1,
    )
    with shared_fleet(plan, folder) as running:
        yield running


@pytest_asyncio.fixture
async def channel(whole: Fleet) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(whole.router.address) as channel:
        yield channel


@pytest_asyncio.fixture
async def running(whole: Fleet, channel: grpc.aio.Channel) -> Fleet:
    """The fleet, of which all workers are ready, whatever the test before has done to them."""
    for node in whole.workers:
        node.resume() if node.is_alive else node.start()
    async with timeout(PATIENCE_SECONDS):
        while len(await ready(channel)) < len(whole.workers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return whole


def about(width: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(prompt="look <image>", media=[{"data": picture(width=width)}])
    request.sampling.temperature = 0
    request.stopping.max_tokens = 8
    return request


async def ready(channel: grpc.aio.Channel) -> Sequence[cluster_service_pb2.Worker]:
    """The workers that the router can reach."""
    stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
    answer = await stub.ListWorkers(cluster_service_pb2.ListWorkersRequest(), timeout=60)
    return [each for each in answer.workers if each.state == cluster_service_pb2.WORKER_STATE_READY]


async def blocks_used(channel: grpc.aio.Channel) -> int:
    return sum(each.load.blocks_used for each in await ready(channel))


async def drained(channel: grpc.aio.Channel) -> None:
    async with timeout(LEASE_SECONDS + 20):
        while await blocks_used(channel):  # noqa: ASYNC110 - what is looked at is in other processes
            await asyncio.sleep(0.05)


async def ask_all(channel: grpc.aio.Channel, count: int) -> list[Answer | BaseException]:
    stub = InferenceServiceStub(channel)
    return await asyncio.gather(*(generate(stub, about(16 + i)) for i in range(count)), return_exceptions=True)


@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_requests_of_a_lost_encode_worker_are_served_by_another(
    running: Fleet, channel: grpc.aio.Channel, fault: str
) -> None:
    expected = [answer for answer in await ask_all(channel, 6) if isinstance(answer, Answer)]
    asking = asyncio.create_task(ask_all(channel, 6))
    await asyncio.sleep(1.2 * ENCODE_SECONDS)  # the first of three is done, the second is at work
    getattr(running.nodes["encode-0"], fault)()
    lost_at = time.monotonic()
    answers = await asking
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    assert [answer.ids for answer in answers if isinstance(answer, Answer)] == [answer.ids for answer in expected]
    assert time.monotonic() - lost_at < 20
    await drained(channel)


async def test_without_another_the_failure_is_typed_and_nothing_is_held(
    running: Fleet, channel: grpc.aio.Channel
) -> None:
    asking = asyncio.create_task(ask_all(channel, 4))
    await asyncio.sleep(1.2 * ENCODE_SECONDS)
    for name in ("encode-0", "encode-1"):
        running.nodes[name].kill()
    failures = [answer for answer in await asking if isinstance(answer, BaseException)]
    assert failures
    for failure in failures:
        assert isinstance(failure, grpc.aio.AioRpcError)
        assert failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
    await drained(channel)
    text = pb.GenerateRequest(prompt="no picture")
    text.stopping.max_tokens = 4
    assert len((await generate(InferenceServiceStub(channel), text)).ids) == 4
