"""A router and its workers with uvloop, and without it: the same answers, cancels, drains and exit codes."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from support.clients.generation import generate, greedy_text
from support.cluster.processes import Process, process
from support.event_loops import LOOPS, choose_loop

from baton.inference.v1 import cluster_service_pb2 as cluster_pb
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.cluster_service_pb2_grpc import ClusterServiceStub
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel
from runtime.aio import timeout

ENGINE = "engine={kind: simulated, name: demo, num_blocks: 512, decode_step_seconds: 0.002}"


@dataclass(frozen=True, slots=True)
class Fleet:
    loop: str
    router: Process
    workers: tuple[Process, ...]


@pytest.fixture(params=LOOPS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A router, a prefill and a decode worker, each in its own process."""
    (tmp_path / "first").mkdir()
    choose_loop(request.param, tmp_path / "first", monkeypatch)
    shared = [f"registry={{kind: file, folder: {tmp_path / 'registry'}}}", "namespace=test", "drain_seconds=5"]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(process("services", f"{role}.yaml", [*shared, ENGINE], tmp_path / f"{role}.log"))
            for role in ("prefill", "decode")
        ]
        own = [*shared, "openai.listen=''", "announce_seconds=0"]
        router = stack.enter_context(process("router", "router.yaml", own, tmp_path / "router.log"))
        for one in (*workers, router):
            one.wait_until_serving()
        yield Fleet(request.param, router, tuple(workers))


def has_uvloop(started: Process) -> bool:
    return any("uvloop" in each.path for each in psutil.Process(started.popen.pid).memory_maps())


@pytest.mark.timeout(180)
async def test_processes_answer_cancel_and_drain_on_either_loop(fleet: Fleet) -> None:
    assert {has_uvloop(one) for one in (fleet.router, *fleet.workers)} == {fleet.loop == "uvloop"}
    request = greedy_text("hello", 20)
    request.routing.topology = pb.TOPOLOGY_DISAGGREGATED
    async with open_channel(fleet.router.address) as channel:
        stub, operators = InferenceServiceStub(channel), ClusterServiceStub(channel)

        async def load() -> list[int]:
            listed = await operators.ListWorkers(cluster_pb.ListWorkersRequest(), timeout=20)
            return [each.load.running + each.load.blocks_used for each in listed.workers]

        answers = await asyncio.gather(*(generate(stub, request) for _ in range(8)))
        assert {answer.text for answer in answers} == {answers[0].text}
        assert answers[0].finished.topology == pb.TOPOLOGY_DISAGGREGATED
        assert len(answers[0].ids) == 20
        long = stub.Generate(greedy_text("hello", 3000), timeout=60)
        async for message in long:
            if message.HasField("token"):
                break
        long.cancel()
        async with timeout(30):
            while any(await load()):  # noqa: ASYNC110 - the workers are other processes
                await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(stub, pb.GenerateRequest(prompt="hello", model="other"))
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert [one.terminate() for one in (fleet.router, *fleet.workers)] == [0, 0, 0]
