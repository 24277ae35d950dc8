"""A router in one of several processes: `python -m router.processes.child FD`, its configuration on stdin.

FD is a socket whose other end the supervisor has. When that end is closed the supervisor has ended, and so does this
process, after its drain.
"""

import asyncio
import socket
import sys
from functools import partial

import structlog

from baton.errors import ConfigError
from router.config import RouterConfig
from router.context import RequestTable
from router.processes import messages
from router.processes.merging import collect
from router.processes.messages import AnyMessage, ProcessLink
from router.processes.siblings import LinkedSiblings, stop_here
from router.server import Router, host_router
from runtime.aio import leaf_errors
from runtime.garbage import exempt_living_objects, return_large_memory
from runtime.process import run
from runtime.telemetry.logs import configure_logging
from runtime.telemetry.metrics import NETWORK, REGISTRY
from runtime.telemetry.monitor import status
from runtime.threads import switch_often

log = structlog.get_logger(__name__)

# How long the other processes may take to be ready to listen.
_START_SECONDS = 120.0
_ANSWER_SECONDS = 10.0


def main() -> None:
    """Exits as `python -m router` does."""
    config = RouterConfig.model_validate_json(sys.stdin.buffer.read())
    configure_logging(config.log.format, config.log.level, router_id=config.router_id, role="router")
    return_large_memory()
    switch_often()
    run(partial(_serve, config, socket.socket(fileno=int(sys.argv[1]))))


async def _serve(config: RouterConfig, connected: socket.socket, stopping: asyncio.Event) -> None:
    # All processes have the same devices, and the supervisor counts them.
    REGISTRY.unregister(NETWORK)
    answers = _Answers(stopping)
    link = await ProcessLink.over(connected, answers.respond)
    serving = asyncio.create_task(link.serve())
    serving.add_done_callback(lambda _: stopping.set())
    try:
        await _host(config, link, answers, stopping)
    except Exception as error:
        wrong = [leaf for leaf in leaf_errors(error) if isinstance(leaf, ConfigError)]
        if not wrong:
            raise
        # The supervisor says it, once for all processes.
        await link.call(messages.Refused(problem=wrong[0].message), messages.Done, _ANSWER_SECONDS)
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def _host(config: RouterConfig, link: ProcessLink, answers: "_Answers", stopping: asyncio.Event) -> None:
    async def may_listen() -> None:
        await link.call(messages.Prepared(), messages.Done, _START_SECONDS)

    siblings = LinkedSiblings(link)
    async with host_router(config, siblings=siblings, shares_port=True, before_listening=may_listen) as router:
        exempt_living_objects()
        answers.router = router
        await link.call(messages.Listening(), messages.Done, _ANSWER_SECONDS)
        await stopping.wait()


class _Answers:
    """The answers of this process, whose main task makes them, to the supervisor; `router` once it listens."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self.router: Router | None = None
        self._stopping = stopping
        self._main = asyncio.current_task()

    @property
    def _requests(self) -> RequestTable:
        return self.router.requests if self.router else RequestTable()

    async def respond(self, question: AnyMessage) -> AnyMessage:
        match question:
            case messages.AskReport():
                report = self.router.report() if self.router else {"status": status(False)}
                return messages.ProcessReport(report=dict(report))
            case messages.Drain(at_once=at_once):
                self._stopping.set()
                if at_once and self._main is not None:
                    self._main.cancel()
            case messages.AskMetrics():
                # In a thread: it takes milliseconds.
                return messages.ProcessMetrics(families=await asyncio.to_thread(collect, REGISTRY))
            case messages.StopRequests(request_id=request_id, caller=caller):
                stopped = await stop_here(self._requests, request_id, caller.caller() if caller else None)
                return messages.RequestsStopped.of(stopped.count, stopped.receipts)
        return messages.Done()


if __name__ == "__main__":
    main()
