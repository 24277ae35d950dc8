"""A router of two processes behind one port."""

import asyncio
import gc
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.cluster.processes import process
from support.cluster.several_processes import SeveralProcesses, own_connection, streams_on_both, until

from baton.inference.v1 import generate_pb2
from router.config import RouterConfig
from router.processes.supervisor import ProcessGroup

pytestmark = pytest.mark.timeout(300)

StartRouter = Callable[..., AbstractContextManager[SeveralProcesses]]


async def generate(address: str, max_tokens: int) -> int:
    """The tokens of one answer."""
    request = generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": max_tokens})
    async with own_connection(address) as stub:
        return sum([len(message.token.token_ids) async for message in stub.Generate(request, timeout=60)])


async def test_a_cancel_reaches_a_request_of_another_process(router: SeveralProcesses) -> None:
    async with streams_on_both(router) as streams, own_connection(router.address) as stub:
        for stream in streams:
            request = generate_pb2.CancelGenerationRequest(request_id=stream.request_id)
            answer = await stub.CancelGeneration(request, timeout=60)
            assert [receipt.worker_id for receipt in answer.receipts] != []
        await until(lambda: all(stream.code == grpc.StatusCode.CANCELLED for stream in streams))


async def test_a_cancel_of_what_runs_nowhere_is_not_found(router: SeveralProcesses) -> None:
    async with own_connection(router.address) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            await stub.CancelGeneration(generate_pb2.CancelGenerationRequest(request_id="none"), timeout=60)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_the_metrics_of_all_are_served_as_one(router: SeveralProcesses) -> None:
    before = router.scrape().sum("baton_router_requests_total")
    for _ in range(8):
        await generate(router.address, 2)
    after = router.scrape()
    assert after.sum("baton_router_requests_total") - before == 8
    assert {"0", "1"} == {
        process for process in ("0", "1", "2") if after.has("baton_router_running_requests", process=process)
    }
    assert after.sum("baton_router_processes") == 2


async def test_a_killed_process_takes_only_its_own_streams_and_is_replaced(router: SeveralProcesses) -> None:
    await generate(router.address, 2)
    async with streams_on_both(router) as streams:
        counted = router.scrape().sum("baton_router_requests_total")
        lost = await asyncio.to_thread(router.running, 0)
        pid = router.kill(0)
        await until(lambda: not psutil.pid_exists(pid))
        # Its socket has left the port, so the kernel gives it no connection that would not be answered.
        assert [await generate(router.address, 2) for _ in range(8)] == [2] * 8
        await until(lambda: sum(stream.code is not None for stream in streams) == lost)
        others = {stream: stream.tokens for stream in streams if stream.code is None}
        await until(lambda: all(stream.tokens > tokens + 3 for stream, tokens in others.items()))
        assert {stream.code for stream in streams} == {None, grpc.StatusCode.UNAVAILABLE}
        await until(lambda: router.all_serve)
    assert [one["restarts"] for one in router.reports()] == [1, 0]
    scraped = router.scrape()
    assert scraped.sum("baton_router_process_restarts_total") == 1
    # What the lost process had counted is still there.
    assert scraped.sum("baton_router_requests_total") >= counted


async def test_sigterm_drains_all_processes(start: StartRouter) -> None:
    with start("drain_seconds=60") as router:
        answers = [asyncio.create_task(generate(router.address, 50)) for _ in range(6)]
        await until(lambda: router.running(0) + router.running(1) == 6)
        pids = [int(one["pid"]) for one in router.reports()]
        router.process.popen.terminate()
        # As systemd does, which signals all processes of a service: it is not their second signal.
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert await asyncio.gather(*answers) == [50] * 6
        assert await asyncio.to_thread(router.process.popen.wait, 60) == 0


async def test_the_processes_end_with_their_supervisor(start: StartRouter) -> None:
    with start("drain_seconds=1") as router:
        pids = [int(one["pid"]) for one in router.reports()]
        router.process.kill()
        await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_port_0_is_one_port_for_all(registry: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process("router", "router.yaml", [registry, "processes=2", "log.format=json", "listen=127.0.0.1:0"], log):
        while "router listens" not in log.read_text():
            time.sleep(0.05)
        line = next(line for line in log.read_text().splitlines() if "router listens" in line)
        with grpc.insecure_channel(json.loads(line)["address"]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status


def test_what_is_wrong_is_said_once(start: StartRouter) -> None:
    with pytest.raises(AssertionError) as caught, start("routing.policy=nothing"):
        pass
    lines = [line for line in str(caught.value).splitlines() if "nothing" in line]
    assert len(lines) == 1, lines
    assert not lines[0].startswith("Traceback")


def test_a_port_that_another_router_shares_is_taken(router: SeveralProcesses, start: StartRouter) -> None:
    with pytest.raises(AssertionError, match="is the port taken"), start(f"listen={router.address}"):
        pass


async def test_a_stop_before_all_processes_listen_leaves_no_error_behind() -> None:
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    group, stopping = ProcessGroup(RouterConfig(processes=2)), asyncio.Event()
    stopping.set()
    await group._all_listen(stopping)
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()
    assert not errors
