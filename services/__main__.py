"""`python -m services CONFIG.yaml key=value...`: runs a worker, or one rank of it; `--print-config` shows settings."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

from baton.errors import ConfigError, EngineFailed
from runtime.clock import monotonic
from runtime.garbage import exempt_living_objects
from runtime.process import run
from runtime.settings import Process
from runtime.telemetry.logs import configure_logging
from runtime.telemetry.monitor import MonitorServer, serve_monitor
from services.config import WorkerConfig
from services.engines.registry import describe, follow, prepare
from services.keeper.client import KeeperClient
from services.keeper.fork_server import keep_imports
from services.keeper.keeper import replace_this_process
from services.keeping import beating, begin_start, note_start
from services.server import host_worker, prepare_services
from services.telemetry.gpu import watched_gpus
from services.telemetry.rank_health import RankHealth
from services.worker import exit_soon, supervise

PROCESS = Process(
    command="python -m services",
    about="Runs a Baton worker.",
    model=WorkerConfig,
    prefix="BATON_WORKER__",
    example="deploy/config/worker.yaml",
)


def main() -> None:
    """Exit codes: 0 after a drain, 1 if the engine fails, also on another rank, 2 if the configuration is wrong.

    With `keep_memory` this process becomes the keeper, which starts the worker as its child.
    """
    loaded, is_printed = PROCESS.read()
    if is_printed:
        print("\n".join([*loaded.describe(), *_described(loaded.value)]))
        return
    keeper = KeeperClient.of_this_process()
    config = loaded.value.named()
    if keeper is None and config.keep_memory.is_on:
        # With the id that may have been generated just now: all its processes are one worker.
        # Quoted: the value of an override is YAML, in which 12 is no text.
        replace_this_process([*sys.argv[1:], f"worker_id={json.dumps(config.worker_id)}"])
    if keeper is not None and config.keep_memory.is_on and config.keep_memory.imports:
        keeper = _with_imports(config, keeper)
        config = PROCESS.read()[0].value.named()  # as it is now: in a process that is forked that is later
    configure_logging(config.log.format, config.log.level, worker_id=config.worker_id, role=",".join(config.roles))
    run(partial(_work, config, keeper, monotonic()))


def _described(config: WorkerConfig) -> list[str]:
    with _configured():
        return describe(config.engine)


def _with_imports(config: WorkerConfig, keeper: KeeperClient) -> KeeperClient:
    """Imports all that the worker needs, for the processes after this one, too. Returns the keeper of each."""
    with _configured():
        prepare(config.engine)
    prepare_services()
    exempt_living_objects()
    return keep_imports(keeper)


@contextmanager
def _configured() -> Iterator[None]:
    """Ends the process if its configuration is wrong."""
    try:
        yield
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        raise SystemExit(2) from None


async def _work(config: WorkerConfig, keeper: KeeperClient | None, imported_at: float, stopping: asyncio.Event) -> None:
    tls = config.metrics_tls.server_context("metrics_tls") if config.metrics_tls else None
    serving = serve_monitor(config.metrics_listen, tls)
    async with AsyncExitStack() as stack:
        stack.enter_context(watched_gpus())
        ready = stack.enter_context(_abandoned_on(stopping))
        if config.engine.is_follower:
            ready.set()  # it notices `stopping` itself
            await _follow(config, stack.enter_context(serving), stopping)
            return
        # Without `keep_memory` a keeper only starts the worker again.
        holder = keeper if config.keep_memory.is_on else None
        begin_start(keeper, config)
        await stack.enter_async_context(beating(keeper, stopping))
        opening = host_worker(config, keeper=holder)
        if keeper is not None and keeper.start.is_successor:
            # The port is its predecessor's until that ends.
            worker = await stack.enter_async_context(opening)
            monitor = stack.enter_context(serving)
        else:
            monitor = stack.enter_context(serving)
            worker = await stack.enter_async_context(opening)
        note_start(keeper, config.keep_memory, imported_at)
        exempt_living_objects()
        ready.set()
        monitor.answer_with(worker.report)
        await supervise(worker, stopping)


async def _follow(config: WorkerConfig, monitor: MonitorServer, stopping: asyncio.Event) -> None:
    """Computes as a rank above 0, and registers nowhere. If rank 0 is lost, the process ends even if a thread hangs."""
    health = RankHealth(config.worker_id)
    monitor.answer_with(health.report)
    try:
        await follow(config.engine, health, stopping)
    except EngineFailed:
        exit_soon()
        raise
    finally:
        health.end()


@contextmanager
def _abandoned_on(stopping: asyncio.Event) -> Iterator[asyncio.Event]:
    """Cancels the task if it is to stop before it is ready: a model that is being loaded has nothing to drain."""
    ready = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.ensure_future(stopping.wait())

    def abandon(stopped: "asyncio.Future[Any]") -> None:
        if not stopped.cancelled() and not ready.is_set():
            task.cancel()

    watcher.add_done_callback(abandon)
    try:
        yield ready
    finally:
        watcher.cancel()


if __name__ == "__main__":
    main()
