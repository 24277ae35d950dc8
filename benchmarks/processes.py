"""Processes for benchmarks: workers, routers and clients run separately, and are controlled through pipes."""

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.config import RouterConfig
from router.server import host_router
from runtime.garbage import collect_rarely, collected_as_memory_grows, exempt_living_objects, return_large_memory
from runtime.telemetry.logs import configure_logging

_PATIENCE_SECONDS = 400.0  # an engine loads for a minute on a busy machine

_context = multiprocessing.get_context("spawn")


@asynccontextmanager
async def child(target: Callable[..., None], *arguments: object) -> AsyncIterator[tuple[Connection, int]]:
    """A process that runs `target(pipe, *arguments)`: our end of the pipe, and its id. Sends "stop" on exit."""
    pipe, end = _context.Pipe()
    process = _context.Process(target=target, args=(end, *arguments))
    process.start()
    end.close()  # so that we notice if the process fails
    try:
        assert process.pid
        yield pipe, process.pid
    finally:
        with suppress(OSError):  # It may have ended.
            pipe.send("stop")
        await asyncio.to_thread(process.join, 10)
        process.kill()


async def received(pipe: Connection) -> Any:
    """The next object from a pipe. Raises EOFError if its process exits first, SystemExit on a timeout."""
    if not await asyncio.to_thread(pipe.poll, _PATIENCE_SECONDS):
        raise SystemExit("a benchmark process does not respond")
    return pipe.recv()


def run_process(main: Callable[[], Awaitable[None]]) -> None:
    """Runs `main` like the real processes: with uvloop, and one JSON log line for each request in a file."""
    with open(os.devnull, "w") as sink:
        os.dup2(sink.fileno(), 2)
    run_like_real(main)


def run_like_real(main: Callable[[], Awaitable[None]]) -> None:
    """The same with the log on stderr, where it is seen how a process fails."""
    configure_logging("json", "info")
    exempt_living_objects()
    collect_rarely()
    uvloop.run(_supervised(main))


async def _supervised(main: Callable[[], Awaitable[None]]) -> None:
    async with collected_as_memory_grows():
        await main()


async def until_told(pipe: Connection) -> None:
    """Waits for the end of the pipe, or for a message through it."""
    await asyncio.to_thread(pipe.poll, None)


@asynccontextmanager
async def routing(config: RouterConfig, records: Sequence[WorkerRecord]) -> AsyncIterator[str]:
    """The address of a router in this process that finds all these workers ready."""
    registry = MemoryRegistry("benchmark")
    async with AsyncExitStack() as stack:
        for record in records:
            await stack.enter_async_context(registry.register(record))
        router = await stack.enter_async_context(host_router(config, registry))
        while sum(not worker.problem for worker in router.cluster.workers) < len(records):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield router.address


def run_router(pipe: Connection, config: RouterConfig) -> None:
    """Routes to the workers whose records come first through the pipe, until it ends. Sends its address."""

    async def serve() -> None:
        async with routing(config, await received(pipe)) as address:
            pipe.send(address)
            await until_told(pipe)

    return_large_memory()
    run_process(serve)


def cpu_nanoseconds(pid: int) -> int:
    """CPU time of a process's threads so far; more precise than the ticks of /proc/PID/stat."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
