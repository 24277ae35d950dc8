"""Each process logs one line for a request, at its end, with ids that connect the lines of all processes."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.cluster.fleet import PATIENT, Fleet, FleetPlan, Node, shared_fleet
from support.eventually import eventually
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

TRACE = "0af7651916cd43dd8448eb211c80319c"
IN_A_TRACE = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)

Line = dict[str, Any]


@pytest.fixture(scope="module")
def running(shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A router, a prefill and a decode worker, which write JSON."""
    worker = ("engine.kind=simulated", "engine.name=demo")
    plan = FleetPlan("log-lines", shared_etcd.endpoint, worker, (PATIENT, "router_id=router-7"), prefill=1, decode=1)
    with shared_fleet(plan, tmp_path_factory.mktemp("log-lines")) as started:
        yield started


async def generated(running: Fleet, request_id: str, **fields: Any) -> None:
    """A request, however it ends, once the workers know each other's pools."""
    async with grpc.aio.insecure_channel(running.router.address) as channel:
        stub = InferenceServiceStub(channel)
        for name in ("first", request_id):
            asked = {"request_id": name, "prompt": "hello", "stopping": {"max_tokens": 3}, **fields}
            with suppress(grpc.aio.AioRpcError):
                async for _ in stub.Generate(pb.GenerateRequest(**asked), metadata=IN_A_TRACE):
                    pass


def lines(log: Path) -> list[Line]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def lines_of(process: Node, request_id: str) -> list[Line]:
    """Those of a request, once there are any: a process writes its line after the caller has its answer."""

    def found() -> list[Line]:
        return [line for line in lines(process.log) if line.get("request_id") == request_id]

    await eventually(lambda: bool(found()))
    return found()


async def test_each_process_writes_one_line_of_a_request_at_its_end(running: Fleet) -> None:
    await generated(running, "r-1")
    for process in (running.router, *running.workers):
        (line,) = await lines_of(process, "r-1")
        assert (line["event"], line["level"], line["code"]) == ("call ended", "info", "OK")


async def test_a_line_says_which_trace_it_belongs_to(running: Fleet) -> None:
    await generated(running, "r-2")
    for process in (running.router, *running.workers):
        assert [line["trace_id"] for line in await lines_of(process, "r-2")] == [TRACE]


async def test_every_line_says_which_process_wrote_it(running: Fleet) -> None:
    await generated(running, "r-3")
    await lines_of(running.router, "r-3")
    assert {line.get("router_id") for line in lines(running.router.log)} == {"router-7"}
    for process in running.workers:
        assert {line.get("worker_id") for line in lines(process.log)} == {process.log.stem}


async def test_the_routers_line_names_the_workers_and_what_became_of_it(running: Fleet) -> None:
    await generated(running, "r-4")
    (line,) = await lines_of(running.router, "r-4")
    said = {key: line[key] for key in ("outcome", "prefill_worker_id", "decode_worker_id", "completion_tokens")}
    assert said == {
        "outcome": "OK",
        "prefill_worker_id": "prefill-0",
        "decode_worker_id": "decode-0",
        "completion_tokens": 3,
    }
    assert 0 < line["ttft_seconds"] <= line["total_seconds"]


async def test_a_refused_request_is_one_line_that_says_why(running: Fleet) -> None:
    await generated(running, "r-5", prompt="")
    (line,) = await lines_of(running.router, "r-5")
    assert (line["code"], line["reason"], line["trace_id"]) == ("INVALID_ARGUMENT", "INVALID_REQUEST", TRACE)
