"""Workers, a router and a client of newer versions beside a router and a worker in processes of their own."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from support.cluster.in_process import simulated
from support.cluster.processes import Process, forked
from support.eventually import PATIENCE_SECONDS
from support.images.simulated_workers import about, multimodal
from support.newer_versions import NEWER, enum_paths, make_newer, methods, set_path
from support.servers.tampering import Tampered, tampered

from baton.calls import stream, unary
from baton.connection.credentials import RECORDED, TENANT_KEY
from baton.engine.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.errors import BatonError
from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    generate_pb2,
    inference_service_pb2,
    inference_service_pb2_grpc,
    record_pb2,
    video_pb2,
    video_pb2_grpc,
)
from discovery.file import FileRegistry
from discovery.registry import Registry, WorkerRecord
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import Service, serve
from runtime.aio import timeout

pytestmark = pytest.mark.timeout(240)

ENGINE = "engine={kind: simulated, name: demo, num_blocks: 512, block_bytes: 64, image_tokens: 4}"
QUOTAS = "quotas={default: {requests_per_second: 1000, tokens_per_second: 100000}}"
STUBS = {
    decode_pb2: decode_pb2_grpc.DecodeServiceStub,
    encode_pb2: encode_pb2_grpc.EncodeServiceStub,
    handoff_pb2: handoff_pb2_grpc.HandoffServiceStub,
    prefill_pb2: prefill_pb2_grpc.PrefillServiceStub,
    worker_pb2: worker_pb2_grpc.WorkerServiceStub,
    inference_service_pb2: inference_service_pb2_grpc.InferenceServiceStub,
    cluster_service_pb2: cluster_service_pb2_grpc.ClusterServiceStub,
    video_pb2: video_pb2_grpc.VideoServiceStub,
}
# These end other tests' workers, or ask for what no worker has.
_NOT_CALLED = {"Drain", "ChangeRole", "DrainWorker"}


@dataclass
class Outside:
    """A router's process, as `tampered` knows a bench."""

    registry: Registry
    stub: inference_service_pb2_grpc.InferenceServiceStub
    operators: cluster_service_pb2_grpc.ClusterServiceStub
    router: Process

    @property
    def cluster(self) -> "Outside":
        return self

    workers: tuple[Any, ...] = ()

    async def ready(self, count: int) -> None:
        """Waits until the router sends work to that many workers; those of `tampered` come one after the other."""
        async with timeout(PATIENCE_SECONDS):
            while True:
                listed = await self.operators.ListWorkers(cluster_service_pb2.ListWorkersRequest(), timeout=20)
                usable = [one for one in listed.workers if one.state == cluster_service_pb2.WORKER_STATE_READY]
                if len(usable) >= count:
                    self.workers = tuple(usable)
                    return

    async def lists_tenant(self, tenant: str) -> None:
        """Waits until the router lists that tenant of another router, which it must first find in the registry."""
        async with timeout(PATIENCE_SECONDS):
            while True:
                listing = self.operators.ListTenants(cluster_service_pb2.ListTenantsRequest(), timeout=20)
                if tenant in {each.tenant for each in (await unary(listing)).tenants}:
                    return

    async def answer(self, **fields: Any) -> generate_pb2.Finished:
        request = generate_pb2.GenerateRequest(**{"prompt": "hello", "stopping": {"max_tokens": 4}, **fields})
        metadata = (*RECORDED, (TENANT_KEY, "one"))
        messages = [message async for message in self.stub.Generate(request, timeout=30, metadata=metadata)]
        return messages[-1].finished

    async def status(self) -> str:
        try:
            await self.answer()
        except aio.AioRpcError as error:
            return error.code().name
        return "OK"

    def require_sound(self) -> None:
        """The process lives, and no exception has left a call or a task."""
        assert self.router.popen.poll() is None
        assert "Traceback" not in self.router.log.read_text()


class NewerRouter(peer_pb2_grpc.PeerServiceServicer):
    """A router of a newer version: whatever it lends, knows or has recorded is of kinds that have no name here."""

    async def Lend(self, request: peer_pb2.LendRequest, context: Any) -> peer_pb2.LendResponse:
        quota, places = peer_pb2.QuotaLoan(exceeded=NEWER), peer_pb2.PlacesLoan(not_home=True)  # type: ignore[arg-type]
        return peer_pb2.LendResponse(quotas=[quota for _ in request.quotas], places=[places for _ in request.places])

    async def Promise(self, request: peer_pb2.PromiseRequest, context: Any) -> peer_pb2.PromiseResponse:
        return peer_pb2.PromiseResponse(knows_caller=True)

    async def ListOwnTenants(self, request: Any, context: Any) -> peer_pb2.ListOwnTenantsResponse:
        return peer_pb2.ListOwnTenantsResponse(tenants=[{"tenant": "elsewhere"}])

    async def FindRecords(self, request: Any, context: Any) -> peer_pb2.FindRecordsResponse:
        record = record_pb2.RequestRecord(request_id=request.request_id)
        for path in enum_paths(record_pb2.RequestRecord.DESCRIPTOR):
            set_path(record, path)
        return peer_pb2.FindRecordsResponse(records=[record])


Processes = tuple[Process, Process, Path]
"""A router, a worker, and the folder by which they find each other."""


@contextmanager
def started(tmp_path: Path) -> Iterator[Processes]:
    folder = tmp_path / "registry"
    shared = [f"registry={{kind: file, folder: {folder}, poll_seconds: 0.05}}", "namespace=test", "drain_seconds=0"]
    with ExitStack() as stack:
        worker = [*shared, ENGINE, "worker_id=old", "roles=[encode, prefill, decode]"]
        old = stack.enter_context(forked("services", "worker.yaml", worker, tmp_path / "worker.log"))
        listening = "peers={listen: '127.0.0.1:0'}"
        own = [*shared, QUOTAS, listening, "records.asked=true", "metrics_listen=127.0.0.1:0"]
        router = stack.enter_context(forked("router", "router.yaml", own, tmp_path / "router.log"))
        old.wait_until_serving()
        router.wait_until_serving()
        yield router, old, folder


@asynccontextmanager
async def connected(processes: Processes) -> AsyncIterator[Outside]:
    router, _, folder = processes
    async with FileRegistry(folder, "test", poll_seconds=0.05) as registry, open_channel(router.address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        running = Outside(registry, stub, cluster_service_pb2_grpc.ClusterServiceStub(channel), router)
        await running.ready(1)
        yield running
        running.require_sound()


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Processes to which no other worker or router comes: the tests share them."""
    with started(tmp_path_factory.mktemp("called")) as processes:
        yield processes


@pytest.fixture
async def outside(tmp_path: Path) -> AsyncIterator[Outside]:
    with started(tmp_path) as processes:
        async with connected(processes) as running:
            yield running


@asynccontextmanager
async def newer_workers(running: Outside, *, multiplexed: bool) -> AsyncIterator[list[Tampered]]:
    async with AsyncExitStack() as stack:
        configs = [multimodal(f"new-{number}", "encode", "prefill", "decode") for number in range(2)]
        found = [
            await stack.enter_async_context(tampered(running, config, multiplexed=multiplexed))  # type: ignore[arg-type]
            for config in configs
        ]
        for each in found:
            each.change_all = lambda message: make_newer(message, set())
        yield found


@pytest.mark.parametrize("multiplexed", [False, True])
async def test_answers_of_newer_workers_are_ok(outside: Outside, multiplexed: bool) -> None:
    async with newer_workers(outside, multiplexed=multiplexed) as workers:
        for topology in ("TOPOLOGY_AGGREGATED", "TOPOLOGY_DISAGGREGATED"):
            for _ in range(6):
                ended = await outside.answer(routing={"topology": topology})
                assert ended.reason == NEWER or ended.usage.completion_tokens == 4
            await outside.answer(routing={"topology": topology}, **about(max_tokens=2))
        assert any(each.calls["Decode"] for each in workers)
        await outside.ready(3)


async def test_records_of_newer_workers_and_routers_are_taken_or_left(outside: Outside) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(
            tampered(outside, simulated("plain", "prefill", "decode"), multiplexed=True)  # type: ignore[arg-type]
        )
        odd = {"roles": ("dream",), "capabilities": ("dreams",), "offers": ("light",), "reads": ("light",)}
        for number, (key, value) in enumerate(odd.items()):
            record = replace(found.record, worker_id=f"odd-{number}", **{key: value})
            await stack.enter_async_context(outside.registry.register(record))
        await outside.ready(3)
        for _ in range(6):
            assert (await outside.answer()).usage.completion_tokens == 4


async def test_what_a_newer_router_says_is_taken_or_left(outside: Outside) -> None:
    add = peer_pb2_grpc.add_PeerServiceServicer_to_server
    service = Service("baton.engine.v1.PeerService", add, NewerRouter())
    serving = serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0)
    async with serving as server:
        own = await first_router(outside.registry)
        async with outside.registry.routers.register(replace(own, worker_id="newer", address=server.address)):
            request = record_pb2.GetRecordsRequest(request_id="any")
            # Where it is the lender, it refuses.
            assert {await outside.status() for _ in range(6)} <= {"OK", "RESOURCE_EXHAUSTED"}
            await outside.lists_tenant("elsewhere")
            [found] = (await unary(outside.stub.GetRecords(request, timeout=20))).records
            assert found.cause == NEWER


async def first_router(registry: Registry) -> WorkerRecord:
    async with aclosing(registry.routers.watch()) as watched:
        async for records in watched:
            if records:
                return records[0]
    raise AssertionError("the watch has ended")


@pytest.mark.parametrize("file", STUBS, ids=[file.DESCRIPTOR.name.rpartition("/")[2] for file in STUBS])
async def test_a_request_of_a_newer_caller_is_answered_or_refused_by_name(called: Processes, file: Any) -> None:
    router, old, _ = called
    is_worker = file in (decode_pb2, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2)
    refused: list[tuple[str, list[str], str]] = []
    async with open_channel((old if is_worker else router).address) as channel:
        for method in methods([file]):
            for path in enum_paths(method.input_type):
                if method.name in _NOT_CALLED:
                    continue
                request = method.input_type._concrete_class()
                set_path(request, path)
                call = getattr(STUBS[file](channel), method.name)(request, timeout=20)
                try:
                    if method.server_streaming:
                        async with aclosing(stream(call)) as found:
                            async for _ in found:
                                break
                    else:
                        await unary(call)
                except BatonError as error:
                    refused.append((method.name, [field.name for field in path], error.reason))
    assert not [each for each in refused if each[2] == "INTERNAL_ERROR"]
    assert old.popen.poll() is None
    assert "Traceback" not in old.log.read_text()
    async with connected(called) as outside:
        assert (await outside.answer()).usage.completion_tokens == 4
