"""Fixtures: the `baton` command as a process, and a small cluster in this process that it calls."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.clients.baton_command import Baton, Outcome, SmallCluster
from support.clients.forked_command import begin_to_import, may_be_forked, run_forked
from support.cluster.in_process import PLACED_BY_LOAD
from support.eventually import eventually
from support.lifetimes import in_one_task

from discovery.memory import MemoryRegistry
from router.config import ProbeConfig, RouterConfig
from router.server import host_router
from runtime.aio import timeout
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

COMMAND_SECONDS = 240.0  # `baton up` on a very busy machine; it gives up by itself after 300


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of commands, without variables that point to another cluster."""
    return {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}


@pytest.fixture
def baton(tmp_path: Path, environment: dict[str, str]) -> Baton:
    """Runs the command in a folder of the test's own."""
    return command_in(tmp_path, environment)


def command_in(folder: Path, environment: Mapping[str, str]) -> Baton:
    """Runs the command in that folder, with the environment as it is then."""
    if may_be_forked(environment):
        begin_to_import()

    async def run(*words: str | bytes, stdin: bytes = b"") -> Outcome:
        run_one = run_forked if may_be_forked(environment) else _run_anew
        async with timeout(COMMAND_SECONDS):
            return await run_one(words, folder, environment, stdin)

    return run


async def _run_anew(
    words: Sequence[str | bytes], folder: Path, environment: Mapping[str, str], stdin: bytes
) -> Outcome:
    """Runs it by an interpreter of its own, which may have other packages."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env=environment,
    )
    out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


@pytest.fixture
async def cluster() -> AsyncIterator[SmallCluster]:
    """Simulated workers that take 5 ms a token."""
    async with in_one_task(_small_cluster()) as running:
        yield running


@asynccontextmanager
async def _small_cluster() -> AsyncIterator[SmallCluster]:
    registry = MemoryRegistry("test")
    router_config = RouterConfig(
        listen="127.0.0.1:0",
        probe=ProbeConfig(interval_seconds=0.1, timeout_seconds=2.0),
        drain_seconds=0,
        routing=PLACED_BY_LOAD,
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
