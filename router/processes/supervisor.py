"""Several processes as one router: the same ports, one /metrics and /health, started and drained together."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack, asynccontextmanager
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Metric

from router.config import RouterConfig
from router.processes.merging import MergedMetrics, collect
from router.processes.messages import LinkLost, RequestsStopped, StopRequests
from router.processes.process import PROCESSES, RouterProcess
from router.processes.siblings import STOP_SECONDS
from rpc.timeouts import CLEANUP_SECONDS
from runtime.aio import TaskGroup, timeout, ungrouped
from runtime.network import reserved_port
from runtime.telemetry.metrics import REGISTRY
from runtime.telemetry.monitor import Report, serve_monitor, status

log = structlog.get_logger(__name__)

_SCRAPE_SECONDS: Final = 5.0
# After a drain, before processes that are still there are killed.
_MARGIN_SECONDS: Final = 5.0


async def supervise(config: RouterConfig, stopping: asyncio.Event) -> None:
    """Runs a router in `config.processes` processes until `stopping` is set and all have drained.

    A process that ends is replaced. Raises ConfigError if the configuration is wrong, before anything listens.
    """
    tls = config.metrics_tls.server_context("metrics_tls") if config.metrics_tls else None
    with ExitStack() as stack:
        config = _with_ports(stack, config)
        processes = ProcessGroup(config)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ScrapedProcesses(processes, asyncio.get_running_loop()))
        monitor = stack.enter_context(serve_monitor(config.metrics_listen, tls, registry))
        monitor.answer_with(processes.report)
        async with processes.running(stopping):
            log.info("router listens", address=config.listen, namespace=config.namespace, processes=config.processes)
            await stopping.wait()


def _with_ports(stack: ExitStack, config: RouterConfig) -> RouterConfig:
    """The configuration with the actual ports, which stay reserved until the stack is closed."""
    config = config.model_copy(update={"listen": stack.enter_context(reserved_port(config.listen, "listen"))})
    if config.openai.listen:
        openai = stack.enter_context(reserved_port(config.openai.listen, "openai.listen"))
        config = config.model_copy(update={"openai": config.openai.model_copy(update={"listen": openai})})
    if config.picker.listen:
        picker = stack.enter_context(reserved_port(config.picker.listen, "picker.listen"))
        config = config.model_copy(update={"picker": config.picker.model_copy(update={"listen": picker})})
    return config


class ProcessGroup:
    """The processes of one router."""

    def __init__(self, config: RouterConfig) -> None:
        self._drain_seconds = config.announce_seconds + config.drain_seconds + CLEANUP_SECONDS + _MARGIN_SECONDS
        self._metrics = MergedMetrics()
        self._prepared: set[str] = set()
        self._may_listen = asyncio.Event()
        self._processes = [
            RouterProcess(number, config, self._prepare, self._stop_elsewhere) for number in range(config.processes)
        ]

    @asynccontextmanager
    async def running(self, stopping: asyncio.Event) -> AsyncGenerator[None, None]:
        """Starts all; yields when each has listened, or `stopping` is set. At the end they drain together."""
        with ungrouped():
            async with TaskGroup() as group:
                keeping = [group.create_task(each.keep(stopping, self._record_end)) for each in self._processes]
                try:
                    await self._all_listen(stopping)
                    yield
                    stopping.set()
                    await self._drain()
                    await self._ended(keeping)
                except asyncio.CancelledError:
                    # The second signal; or one cannot start, and none has served anything yet.
                    if stopping.is_set():
                        await self._drain(at_once=True)
                    else:
                        self._kill()
                    raise

    def report(self) -> Report:
        """The report at /health: SERVING if any process serves; roles and models as the first of these sees them."""
        reports = [each.report() for each in self._processes]
        PROCESSES.set(sum(each.listens.is_set() for each in self._processes))
        serving = [one for one in reports if one["status"] == status(True)]
        seen = serving[0] if serving else reports[0]
        own = ("process", "pid", "restarts", "status")
        return {
            "status": status(bool(serving)),
            **{key: value for key, value in seen.items() if key not in own},
            "processes": [{key: one[key] for key in own} for one in reports],
        }

    async def metrics(self) -> list[Metric]:
        """The metrics of all; of a process that does not answer, as they were the last time."""
        PROCESSES.set(sum(each.listens.is_set() for each in self._processes))
        self._metrics.update("supervisor", collect(REGISTRY))
        await asyncio.gather(*(self._scrape(each) for each in self._processes))
        return self._metrics.merged()

    async def _scrape(self, process: RouterProcess) -> None:
        try:
            self._metrics.update(process.name, await process.metrics())
        except (LinkLost, TimeoutError):
            log.debug("process of the router did not report its metrics", process=process.name)

    async def _prepare(self, process: RouterProcess) -> None:
        """Returns when a process may listen: the first time, when all can, so that each gets its connections."""
        self._prepared.add(process.name)
        if len(self._prepared) == len(self._processes):
            self._may_listen.set()
        await self._may_listen.wait()

    async def _all_listen(self, stopping: asyncio.Event) -> None:
        stopped = asyncio.ensure_future(stopping.wait())
        listening = asyncio.ensure_future(self._each_listens())
        try:
            await asyncio.wait((stopped, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            listening.cancel()

    async def _each_listens(self) -> None:
        for each in self._processes:
            await each.listens.wait()

    async def _ended(self, keeping: Iterable["asyncio.Task[None]"]) -> None:
        try:
            async with timeout(self._drain_seconds):
                await asyncio.wait(keeping)
        except TimeoutError:
            log.error("processes of the router did not end", seconds=self._drain_seconds)
            self._kill()

    def _record_end(self, process: RouterProcess) -> None:
        self._metrics.leave(process.name)

    async def _drain(self, *, at_once: bool = False) -> None:
        await asyncio.gather(*(each.drain(at_once=at_once) for each in self._processes))

    def _kill(self) -> None:
        for each in self._processes:
            each.signal(signal.SIGKILL)

    async def _stop_elsewhere(self, asking: RouterProcess, question: StopRequests) -> RequestsStopped:
        """Stops requests in all other processes. One that does not answer is taken to have none."""
        others = [each for each in self._processes if each is not asking]
        answers = await asyncio.gather(*(_stop(each, question) for each in others))
        receipts = [receipt for answer in answers for receipt in answer.receipts]
        return RequestsStopped(count=sum(answer.count for answer in answers), receipts=receipts)


async def _stop(process: RouterProcess, question: StopRequests) -> RequestsStopped:
    try:
        return await process.stop(question, STOP_SECONDS)
    except LinkLost:
        return RequestsStopped(count=0)
    except TimeoutError:
        log.warning("process of the router did not answer a cancel", process=process.name)
        return RequestsStopped(count=0)


class ScrapedProcesses:
    """A collector of the processes' metrics, for the threads of the HTTP server."""

    def __init__(self, processes: ProcessGroup, loop: asyncio.AbstractEventLoop) -> None:
        self._processes = processes
        self._loop = loop

    def collect(self) -> list[Metric]:
        """The metrics of all processes, for prometheus_client. Raises TimeoutError."""
        asked = asyncio.run_coroutine_threadsafe(self._processes.metrics(), self._loop)
        return asked.result(_SCRAPE_SECONDS)
