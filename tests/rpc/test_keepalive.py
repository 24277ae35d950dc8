"""Both sides notice a peer that stops and leaves its connection open."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.eventually import eventually
from support.servers.scripted_router import scripted

from baton.calls import stream
from baton.errors import Unavailable
from baton.inference.v1 import generate_pb2 as pb
from rpc.channels import open_channel

# A ping after 10 s of silence, and 10 s for its answer; the rest is for a busy machine.
NOTICED_SECONDS = 25.0

SERVER = """
import asyncio
from rpc.health import Health
from rpc.server import serve

async def main():
    async with serve("127.0.0.1:0", [], health=Health()) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""

CALLER = """
import asyncio, sys
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from baton.calls import stream
from rpc.channels import open_channel

async def main():
    async with open_channel(sys.argv[1]) as channel:
        async for _ in stream(InferenceServiceStub(channel).Generate(pb.GenerateRequest())):
            print("started", flush=True)

asyncio.run(main())
"""


@asynccontextmanager
async def program(text: str, *arguments: str) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """A Python process, killed at the end, also if it is stopped."""
    command = [sys.executable, "-c", text, *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()


@pytest.mark.slow
async def test_a_frozen_server_is_noticed_while_a_stream_is_silent() -> None:
    async with program(SERVER) as server, open_channel(await line(server)) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async with aclosing(stream(watch)) as changes:
            await anext(changes)
            os.kill(server.pid, signal.SIGSTOP)
            frozen = time.monotonic()
            with pytest.raises(Unavailable):
                await asyncio.wait_for(anext(changes), 2 * NOTICED_SECONDS)
    assert time.monotonic() - frozen < NOTICED_SECONDS


@pytest.mark.slow
async def test_a_frozen_caller_is_noticed_while_its_stream_is_silent() -> None:
    gone: list[float] = []

    async def generate(request: object, context: aio.ServicerContext) -> None:
        await context.write(pb.GenerateResponse())
        try:
            await asyncio.Event().wait()
        finally:
            gone.append(time.monotonic())

    async with scripted(Generate=generate) as peer, program(CALLER, peer.server.address) as caller:
        assert await line(caller) == "started"
        os.kill(caller.pid, signal.SIGSTOP)
        frozen = time.monotonic()
        await eventually(lambda: bool(gone), 2 * NOTICED_SECONDS)
    assert gone[0] - frozen < NOTICED_SECONDS
