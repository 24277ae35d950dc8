"""A router of two processes, as a test sees it; and clients whose connections spread over them."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio
from support.clients.scraping import Scrape, get_health, scrape
from support.cluster.processes import Process

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc

_MOST_STREAMS = 64


@dataclass(frozen=True, slots=True)
class SeveralProcesses:
    """A router of two processes, and where it serves its metrics."""

    process: Process
    metrics: str

    @property
    def address(self) -> str:
        return self.process.address

    def scrape(self) -> Scrape:
        return scrape(self.metrics)

    def reports(self) -> list[Mapping[str, Any]]:
        """The answer of /health about each process."""
        found: list[Mapping[str, Any]] = get_health(self.metrics)[1]["processes"]
        return found

    @property
    def all_serve(self) -> bool:
        return [one["status"] for one in self.reports()] == ["SERVING", "SERVING"]

    def running(self, number: int) -> int:
        """The requests that run in one process."""
        return int(self.scrape().sum("baton_router_running_requests", process=str(number)))

    def kill(self, number: int) -> int:
        """kill -9 of one process; its pid."""
        pid = int(self.reports()[number]["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid


@dataclass(eq=False)
class LongStream:
    """A request that runs until its client leaves, on a connection of its own."""

    request_id: str
    tokens: int = 0
    code: grpc.StatusCode | None = None
    task: "asyncio.Task[None] | None" = field(default=None)

    async def run(self, address: str) -> None:
        request = generate_pb2.GenerateRequest(request_id=self.request_id, prompt="hello")
        request.stopping.max_tokens = 100_000
        async with own_connection(address) as stub:
            try:
                async for message in stub.Generate(request):
                    self.tokens += len(message.token.token_ids)
            except aio.AioRpcError as error:
                self.code = error.code()


@asynccontextmanager
async def own_connection(address: str) -> AsyncIterator[inference_service_pb2_grpc.InferenceServiceStub]:
    """A stub whose channel shares no connection with others."""
    async with aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)


@asynccontextmanager
async def streams_on_both(router: SeveralProcesses) -> AsyncIterator[list[LongStream]]:
    """Streams that run, at least one in each process."""
    streams: list[LongStream] = []
    try:
        while len(streams) < _MOST_STREAMS:
            stream = LongStream(f"long-{len(streams)}")
            stream.task = asyncio.create_task(stream.run(router.address))
            streams.append(stream)
            await until(lambda stream=stream: stream.tokens > 0)  # type: ignore[misc]
            if await asyncio.to_thread(lambda: router.running(0) and router.running(1)):
                break
        yield streams
    finally:
        for stream in streams:
            assert stream.task is not None
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams if stream.task), return_exceptions=True)


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until it holds. Asked in a thread: it may read what another process serves."""
    ends_at = time.monotonic() + seconds
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < ends_at, f"not within {seconds:g} s"
        await asyncio.sleep(0.02)
