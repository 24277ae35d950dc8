"""Clients that have everything kept, in the names of many tenants, and settle nothing: bounded on router and worker."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import psutil
import pytest
from support.clients.scraping import scrape
from support.cluster.processes import Process, process
from support.eventually import eventually
from support.servers.etcd import free_port

from baton.connection.credentials import TENANT_KEY
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from rpc.channels import open_channel

pytestmark = pytest.mark.timeout(280)

MIB = 2**20
TENANTS = 40
# What ended answers may take on the worker, responses on the router and of one tenant, and answers that go on.
FINISHED, STORED, OF_A_TENANT, PARKED = MIB, MIB, MIB // 8, 16
# Of an allocator and of metrics; what is sent is a multiple of it.
SLACK = 24 * MIB
ENGINE = "engine={kind: simulated, name: demo, num_blocks: 60000, block_bytes: 64, max_context_tokens: 16384}"


class Cluster:
    """A router and a worker in processes of their own, with small bounds."""

    def __init__(self, router: Process, worker: Process, openai: str, metrics: tuple[str, str]) -> None:
        self.router, self.worker, self.openai, self._metrics = router, worker, openai, metrics

    def resident(self) -> tuple[int, int]:
        return tuple(psutil.Process(one.popen.pid).memory_info().rss for one in (self.router, self.worker))  # type: ignore[return-value]

    def stored_bytes(self) -> float:
        return scrape(self._metrics[0]).sum("baton_router_stored_response_bytes")

    def kept(self, state: str) -> float:
        return scrape(self._metrics[1]).sum("baton_kept_streams", state=state)

    def kept_bytes(self) -> float:
        return scrape(self._metrics[1]).sum("baton_kept_stream_bytes")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    shared = [f"registry={{kind: file, folder: {tmp_path / 'registry'}}}", "namespace=test", "drain_seconds=0"]
    metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    openai = f"127.0.0.1:{free_port()}"
    bounds = f"keep={{max_seconds: 600, max_parked: {PARKED}, max_finished_bytes: {FINISHED}}}"
    responses = f"openai.responses={{max_bytes: {STORED}, tenant_bytes: {OF_A_TENANT}}}"
    with ExitStack() as stack:
        own = [*shared, ENGINE, bounds, "roles=[prefill, decode]", f"metrics_listen={metrics[1]}"]
        worker = stack.enter_context(process("services", "worker.yaml", own, tmp_path / "worker.log"))
        own = [*shared, f"openai.listen={openai}", responses, f"metrics_listen={metrics[0]}"]
        own += ["limits.max_keep_seconds=600"]
        router = stack.enter_context(process("router", "router.yaml", own, tmp_path / "router.log"))
        worker.wait_until_serving()
        router.wait_until_serving()
        yield Cluster(router, worker, openai, metrics)


def request(tokens: int, **fields: object) -> generate_pb2.GenerateRequest:
    made = generate_pb2.GenerateRequest(prompt="keep this", **fields)  # type: ignore[arg-type]
    made.stopping.max_tokens, made.stopping.ignore_eos = tokens, True
    made.response.keep.FromSeconds(600)
    return made


async def test_ended_answers_and_those_that_go_on_are_bounded(cluster: Cluster) -> None:
    async with open_channel(cluster.router.address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)

        async def ended(tenant: int, tokens: int) -> None:
            answer = request(tokens, sampling={"temperature": 0.0})
            answer.response.logprobs = 5
            async for _ in stub.Generate(answer, timeout=120, metadata=((TENANT_KEY, f"t{tenant}"),)):
                pass

        async def left(tenant: int) -> None:
            call = stub.Generate(request(16_000), timeout=3600, metadata=((TENANT_KEY, f"t{tenant}"),))
            async for message in call:
                if message.HasField("token"):
                    call.cancel()
                    return

        await asyncio.gather(*(ended(tenant, 8) for tenant in range(TENANTS)))
        before = cluster.resident()
        for _ in range(5):
            await asyncio.gather(*(ended(tenant, 400) for tenant in range(TENANTS)))
            await eventually(lambda: 0 < cluster.kept_bytes() <= FINISHED)
        assert cluster.kept("finished") < 5 * TENANTS
        await asyncio.gather(*(left(tenant) for tenant in range(2 * TENANTS)))
        await eventually(lambda: cluster.kept("attached") == 0)
        assert cluster.kept("parked") <= PARKED
        grown = [after - then for after, then in zip(cluster.resident(), before, strict=True)]
        # Of each answer the ids and the alternatives of 400 tokens, 5 a token.
        assert max(grown) < SLACK, grown
        await ended(0, 4)


async def test_stored_responses_are_bounded_for_each_tenant_and_for_all(cluster: Cluster) -> None:
    text = "word " * 1200
    async with httpx2.AsyncClient(base_url=f"http://{cluster.openai}", timeout=120, trust_env=False) as client:

        async def store(tenant: int) -> str:
            body = {"model": "demo", "input": text, "max_output_tokens": 4, "store": True}
            answer = await client.post("/v1/responses", content=json.dumps(body), headers={TENANT_KEY: f"t{tenant}"})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["id"])

        async def found(tenant: int, response_id: str) -> bool:
            answer = await client.get(f"/v1/responses/{response_id}", headers={TENANT_KEY: f"t{tenant}"})
            assert answer.status_code in (200, 404)
            return answer.status_code == 200

        [first] = [await store(0)]
        assert await found(0, first)
        assert not await found(1, first)
        mine = [await store(1) for _ in range(40)]
        assert cluster.stored_bytes() <= 2 * OF_A_TENANT
        assert not await found(1, mine[0])
        assert await found(1, mine[-1])
        assert await found(0, first)  # which the tenant before has not displaced
        for _ in range(10):
            await asyncio.gather(*(store(tenant) for tenant in range(2, TENANTS)))
            assert cluster.stored_bytes() <= STORED
        assert not await found(0, first)
