"""Health checks of workers: one that reports its load is not asked, one that says nothing is asked again and again."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from grpc_health.v1 import health_pb2
from support.eventually import eventually

from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from discovery.record import WorkerRecord
from router.config import ProbeConfig
from router.workers.handle import WorkerHandle
from router.workers.watching.waiting_calls import Waiting
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import Service, serve
from services.telemetry.timings import as_seconds
from services.worker import poll_changes

INTERVAL_SECONDS = 0.3
PROBE = ProbeConfig(interval_seconds=INTERVAL_SECONDS, timeout_seconds=30.0, hung_seconds=60.0)


class CountedHealth(Health):
    """Serves health, and notes when it was asked, until it is told to hang."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_at: list[float] = []
        self.is_alive = asyncio.Event()
        self.is_alive.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        self.asked_at.append(time.monotonic())
        await self.is_alive.wait()
        return await super().Check(request, context)


class Reporting(worker_pb2_grpc.WorkerServiceServicer):
    """Reports its load, which never changes, as often as it is asked to, until it is told to hang."""

    def __init__(self) -> None:
        self.is_alive = asyncio.Event()
        self.is_alive.set()

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, _context: Any
    ) -> AsyncGenerator[worker_pb2.WatchLoadResponse, None]:
        assert request.HasField("repeat_after")
        async with aclosing(poll_changes(int, 0.02, as_seconds(request.repeat_after))) as reports:
            async for _ in reports:
                await self.is_alive.wait()
                yield worker_pb2.WatchLoadResponse()


class RunningAnswer(Waiting):
    """An answer that has begun on a worker."""

    def __init__(self) -> None:
        self.tokens_until_now = 1

    def num_tokens(self) -> int:
        return self.tokens_until_now


@asynccontextmanager
async def watched(
    health: CountedHealth, reporting: Reporting, probe: ProbeConfig = PROBE
) -> AsyncIterator[WorkerHandle]:
    """A worker that is watched as a router watches it."""
    name = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
    services = [Service(name, worker_pb2_grpc.add_WorkerServiceServicer_to_server, reporting)]
    async with serve("127.0.0.1:0", services, health=health, drain_seconds=0) as server:
        health.set("", True)
        async with open_channel(server.address) as channel:
            record = WorkerRecord("w-1", 1, server.address, ("decode",), "m", "simulated", "layout", 100)
            worker = WorkerHandle(record, channel, channel, lambda: None)
            watches = worker.watch_load(probe), worker.health.watch(), worker.health.check(probe)
            worker.health.set_card_problem("")
            tasks = [asyncio.create_task(each) for each in watches]
            try:
                yield worker
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_idle_worker_repeats_its_report_and_is_not_asked_until_it_says_nothing() -> None:
    health, reporting = CountedHealth(), Reporting()
    async with watched(health, reporting):
        await eventually(lambda: bool(health.asked_at))
        # A report may be late on a busy machine: some time that is several intervals long has no check in it.
        await eventually(lambda: time.monotonic() - health.asked_at[-1] > 4 * INTERVAL_SECONDS)
        reporting.is_alive.clear()
        known = len(health.asked_at)
        await eventually(lambda: len(health.asked_at) >= known + 2)


async def test_a_worker_that_is_too_busy_to_answer_its_health_check_is_ready_while_its_answers_go_on() -> None:
    probe = ProbeConfig(interval_seconds=INTERVAL_SECONDS, timeout_seconds=INTERVAL_SECONDS, hung_seconds=60.0)
    health, reporting, answer = CountedHealth(), Reporting(), RunningAnswer()
    async with watched(health, reporting, probe) as worker:
        await eventually(lambda: worker.state == "ready")
        with worker.calls.interruptible(answer):
            health.is_alive.clear()
            reporting.is_alive.clear()
            states = set()
            for _ in range(100):
                answer.tokens_until_now += 1
                states.add(worker.state)
                await asyncio.sleep(0.02)
            assert states == {"ready"}
            await eventually(lambda: "health check failed" in worker.problem)
            answer.tokens_until_now += 1
            await eventually(lambda: worker.state == "ready")
