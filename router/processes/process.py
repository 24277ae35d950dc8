"""One process of a router, as the supervisor sees it: started, watched, and started again when it ends."""

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from baton.errors import ConfigError, Unavailable
from discovery.backoff import Backoff
from router.config import RouterConfig
from router.processes import messages
from router.processes.messages import AnyMessage, Family, LinkLost, ProcessLink
from rpc.timeouts import CLEANUP_SECONDS
from runtime.aio import run_to_completion, timeout
from runtime.clock import monotonic
from runtime.telemetry.metrics import counter, gauge
from runtime.telemetry.monitor import Report, status

PROCESSES = gauge("baton_router_processes", "Processes of this router that listen.")
RESTARTS = counter("baton_router_process_restarts_total", "Processes of this router that ended and were replaced.")


log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 1.0
_START_LOOK_SECONDS: Final = 0.1
# A report that is older says nothing any more.
_FRESH_SECONDS: Final = 4.0
# Without any answer. Its clients have been without one for as long, and the kernel gives it new connections.
_HUNG_SECONDS: Final = 30.0
_METRICS_SECONDS: Final = 2.0
_DRAIN_SECONDS: Final = 2.0
_FIRST_WAIT_SECONDS: Final = 0.2
_LONGEST_WAIT_SECONDS: Final = 30.0
# One that ran so long did not fail at its start.
_STEADY_SECONDS: Final = 60.0


class ProcessEnded(Unavailable):
    """A process of the router ended before it ever listened."""


class RouterProcess:
    """The process of one number.

    `may_listen` returns when it may begin to listen; `stop_elsewhere` stops requests in the other processes.
    """

    def __init__(
        self,
        number: int,
        config: RouterConfig,
        may_listen: Callable[["RouterProcess"], Awaitable[None]],
        stop_elsewhere: Callable[["RouterProcess", messages.StopRequests], Awaitable[messages.RequestsStopped]],
    ) -> None:
        self.name = str(number)
        self.restarts = 0
        self.listens = asyncio.Event()
        self._config = config.model_copy(update={"router_id": f"{config.router_id}-{number}"})
        self._may_listen = may_listen
        self._stop_elsewhere = stop_elsewhere
        self._process: asyncio.subprocess.Process | None = None
        self._link: ProcessLink | None = None
        self._report: Report = {"status": status(False)}
        self._reported_at = 0.0
        self._problem = ""

    async def keep(self, stopping: asyncio.Event, ended: Callable[["RouterProcess"], None]) -> None:
        """Runs it until `stopping` is set and it has ended. Raises ConfigError or ProcessEnded if it cannot start.

        `ended` is called each time that the process has ended.
        """
        backoff, has_listened = Backoff(_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS), False
        while not stopping.is_set():
            started, self._problem = monotonic(), ""
            code = await self._run(stopping)
            ended(self)
            has_listened = has_listened or self.listens.is_set()
            self.listens.clear()
            if stopping.is_set():
                return
            if not has_listened:
                raise ConfigError(self._problem) if self._problem else ProcessEnded(f"it ended with exit code {code}")
            if monotonic() - started > _STEADY_SECONDS:
                backoff.reset()
            wait = backoff.next_seconds()
            found = {"problem": self._problem} if self._problem else {"exit_code": code}
            log.error("process of the router ended", process=self.name, restart_seconds=round(wait, 3), **found)
            self.restarts += 1
            RESTARTS.inc()
            await _first(stopping.wait(), asyncio.sleep(wait))

    def report(self) -> dict[str, object]:
        """Its report at /health."""
        is_fresh = self.listens.is_set() and monotonic() - self._reported_at < _FRESH_SECONDS
        known = self._report if is_fresh else {"status": status(False)}
        pid = self._process.pid if self._process and self._process.returncode is None else None
        return {"process": self.name, "pid": pid, "restarts": self.restarts, **known}

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if there is one."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def drain(self, *, at_once: bool = False) -> None:
        """Tells it to drain. Not by a signal: it may get one of those from who stops all processes of a service."""
        try:
            await self._linked().call(messages.Drain(at_once=at_once), messages.Done, _DRAIN_SECONDS)
        except LinkLost:
            return
        except TimeoutError:
            log.warning("process of the router did not answer", process=self.name)

    async def metrics(self) -> list[Family]:
        """Its metrics. Raises LinkLost, and TimeoutError if it does not answer."""
        answer = await self._linked().call(messages.AskMetrics(), messages.ProcessMetrics, _METRICS_SECONDS)
        return answer.families

    async def stop(self, question: messages.StopRequests, seconds: float) -> messages.RequestsStopped:
        """Stops requests there. Raises LinkLost, and TimeoutError if it does not answer."""
        return await self._linked().call(question, messages.RequestsStopped, seconds)

    def _linked(self) -> ProcessLink:
        if self._link is None:
            raise LinkLost("the process does not run")
        return self._link

    async def _run(self, stopping: asyncio.Event) -> int:
        """Starts the process, and returns its exit code when it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router.processes.child", str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for the supervisor, which has each process drain.
                start_new_session=True,
            )
        self._link = await ProcessLink.over(ours, self._respond)
        beside = [asyncio.create_task(self._link.serve()), asyncio.create_task(self._look())]
        try:
            await _write(process, self._config.model_dump_json().encode())
            if stopping.is_set():
                await self.drain()
            return await process.wait()
        finally:
            self._link = None
            for each in beside:
                each.cancel()
            await asyncio.wait(beside)
            await run_to_completion(_end(process))

    async def _respond(self, question: AnyMessage) -> AnyMessage:
        match question:
            case messages.Prepared():
                await self._may_listen(self)
            case messages.Listening():
                self.listens.set()
            case messages.Refused(problem=problem):
                self._problem = problem
            case messages.StopRequests():
                return await self._stop_elsewhere(self, question)
        return messages.Done()

    async def _look(self) -> None:
        """Asks how it is, again and again; kills it if it has not answered for too long."""
        answered = monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS if self.listens.is_set() else _START_LOOK_SECONDS)
            try:
                answer = await self._linked().call(messages.AskReport(), messages.ProcessReport, _HUNG_SECONDS)
            except LinkLost:
                return
            except TimeoutError:
                log.error("process of the router hangs", process=self.name, seconds=monotonic() - answered)
                self.signal(signal.SIGKILL)
                return
            self._report, self._reported_at = answer.report, monotonic()
            answered = self._reported_at


async def _end(process: asyncio.subprocess.Process) -> None:
    """Waits for a process that has been told to end; not for long."""
    try:
        async with timeout(CLEANUP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _write(process: asyncio.subprocess.Process, content: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(content)
        await process.stdin.drain()
    except ConnectionError:
        # It has ended, as its exit code will say.
        return
    finally:
        process.stdin.close()


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
