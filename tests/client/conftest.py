"""The `baton` command in a process of its own, and a small cluster in this one for it to speak to."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.baton_command import Baton, Outcome, SmallCluster
from support.lifetimes import in_one_task
from support.worker_views import eventually

from discovery.memory import MemoryRegistry
from router.config import ProbeConfig, RouterConfig
from router.host import host_router
from rpc.aio import timeout
from services.config import WorkerConfig
from services.engines.simulated_config import SimulatedConfig
from services.host import host_worker

COMMAND_SECONDS = 60.0


@pytest.fixture
def environment() -> dict[str, str]:
    """What commands run with: nothing that would lead them to another cluster."""
    return {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}


@pytest.fixture
def baton(tmp_path: Path, environment: dict[str, str]) -> Baton:
    """Runs the command in a folder of the test's own."""

    async def run(*words: str | bytes, stdin: bytes = b"") -> Outcome:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "client", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=tmp_path,
            env=environment,
        )
        async with timeout(COMMAND_SECONDS):
            out, err = await process.communicate(stdin)
        assert process.returncode is not None
        return Outcome(process.returncode, out.decode(), err.decode())

    return run


@pytest.fixture
async def cluster() -> AsyncIterator[SmallCluster]:
    """Simulated workers that take 5 ms a token."""
    async with in_one_task(_small_cluster()) as running:
        yield running


@asynccontextmanager
async def _small_cluster() -> AsyncIterator[SmallCluster]:
    registry = MemoryRegistry("test")
    router_config = RouterConfig(
        listen="127.0.0.1:0", probe=ProbeConfig(interval_seconds=0.1, timeout_seconds=2.0), drain_seconds=0
    )
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(host_worker(_worker(role), registry)) for role in ("prefill", "decode")
        ]
        router = await stack.enter_async_context(host_router(router_config, registry))
        await eventually(lambda: sum(not worker.problem for worker in router.cluster.workers) == 2)
        yield SmallCluster(router.address, *workers)


def _worker(role: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{role}-0",
        roles=(role,),  # type: ignore[arg-type]
        engine=SimulatedConfig(name="small", num_blocks=256, decode_step_seconds=0.005),
        drain_seconds=0,
    )
