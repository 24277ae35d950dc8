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
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import Service, serve
from services.telemetry.timings import as_seconds
from services.worker import poll_changes

INTERVAL_SECONDS = 0.3
PROBE = ProbeConfig(interval_seconds=INTERVAL_SECONDS, timeout_seconds=30.0, hung_seconds=60.0)


class CountedHealth(Health):
    """Serves health, and notes when it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_at: list[float] = []

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        self.asked_at.append(time.monotonic())
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


@asynccontextmanager
async def watched(health: CountedHealth, reporting: Reporting) -> AsyncIterator[None]:
    """A worker that is watched as a router watches it."""
    name = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
    services = [Service(name, worker_pb2_grpc.add_WorkerServiceServicer_to_server, reporting)]
    async with serve("127.0.0.1:0", services, health=health, drain_seconds=0) as server:
        health.set("", True)
        async with open_channel(server.address) as channel:
            record = WorkerRecord("w-1", 1, server.address, ("decode",), "m", "simulated", "layout", 100)
            worker = WorkerHandle(record, channel, channel, lambda: None)
            tasks = [asyncio.create_task(worker.watch_load(PROBE)), asyncio.create_task(worker.health.check(PROBE))]
            try:
                yield
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
