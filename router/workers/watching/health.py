"""The health of one worker: what it reports, what checks of it find, and whether its replies were wrong lately."""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.calls import stream, unary
from baton.errors import BatonError, DeadlineExceeded
from discovery.backoff import Backoff
from router.config import ProbeConfig
from router.workers.watching.waiting_calls import WaitingCalls
from runtime.aio import sleep_together
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

_NOT_CHECKED = "its health check has not answered yet"
_NOT_SERVING = "it reports that it is not serving"
_NO_CARD = "its model card has not been read yet"
# The times at which health checks may be due, of all workers together: an idle router sleeps in between.
_TIMES_AN_INTERVAL = 4
# How long a worker gets no requests whose replies were wrong, at first and at most; then how long that counts.
_FIRST_SUSPENSION_SECONDS, _LONGEST_SUSPENSION_SECONDS = 2.0, 60.0
_FORGIVEN_SECONDS = 300.0
# After so many failures in a row checks become rarer, by intervals, up to this.
_MANY_FAILURES, _RAREST = 20, 5
_SERVING = health_pb2.HealthCheckResponse.SERVING


class WorkerHealth:
    """The health of a worker. Watch pushes changes, and repeated Checks detect a hung process.

    `problem` is why it cannot be used now, empty if it is ready; `changed` is called when it may have changed. `calls`
    wait for the worker, and are interrupted if it hangs.
    """

    def __init__(self, worker_id: str, channel: aio.Channel, calls: WaitingCalls, changed: Callable[[], None]) -> None:
        self.problem = _NOT_CHECKED
        self._worker_id = worker_id
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._calls = calls
        self._changed = changed
        self._watch_problem = self._check_problem = _NOT_CHECKED
        self._card_problem = _NO_CARD
        self._fault_problem = ""
        self._suspensions = Backoff(_FIRST_SUSPENSION_SECONDS, _LONGEST_SUSPENSION_SECONDS)
        self._suspended_until = -math.inf
        self._heard_at = monotonic()

    def heard(self) -> None:
        """Notes that the worker has said something: it does not hang."""
        self._heard_at = monotonic()

    @property
    def silent_seconds(self) -> float:
        """The seconds since it was last heard of."""
        return monotonic() - self._heard_at

    @property
    def awaits_card(self) -> bool:
        """True until its model card has been read for the first time, or could not be."""
        return self._card_problem == _NO_CARD

    def mark_unhealthy(self, problem: str) -> None:
        """Marks it unhealthy until its next health check succeeds."""
        self._check_problem = problem
        self._update()

    def set_card_problem(self, problem: str) -> None:
        """Notes why its model card cannot be used; empty if it can."""
        if problem != self._card_problem:
            self._card_problem = problem
            self._update()

    def suspend(self, problem: str) -> None:
        """Lets it get no requests for a while, which is longer each time that it comes soon after the last one."""
        now = monotonic()
        if now < self._suspended_until:
            return
        if now > self._suspended_until + _FORGIVEN_SECONDS:
            self._suspensions.reset()
        seconds = self._suspensions.next_seconds()
        self._suspended_until = now + seconds
        self._fault_problem = problem
        log.warning("worker suspended", worker_id=self._worker_id, seconds=round(seconds, 1), problem=problem)
        asyncio.get_running_loop().call_later(seconds, self._resume)
        self._update()

    async def watch(self) -> None:
        """Follows the health that the worker reports, until cancelled."""
        backoff = Backoff()
        while True:
            try:
                async with aclosing(stream(self._stub.Watch(health_pb2.HealthCheckRequest()))) as responses:
                    async for response in responses:
                        backoff.reset()
                        self._set_watch_problem("" if response.status == _SERVING else _NOT_SERVING)
                self._set_watch_problem("its health stream ended")
            except BatonError as error:
                self._set_watch_problem(f"its health stream failed: {error.message}")
            await asyncio.sleep(backoff.next_seconds())

    async def check(self, probe: ProbeConfig) -> None:
        """Checks the health repeatedly, until cancelled: a hung process reports nothing.

        One that has reported its load within the interval does not hang, and is not asked: only a worker of a version
        that does not repeat its reports, or one that is late, is. Nor does one whose answers go on: it is busy.
        """
        failures = 0
        while True:
            if self._calls.go_on():
                self.heard()
            self._calls.interrupt_unanswered()
            unasked_seconds = probe.interval_seconds - self.silent_seconds
            if unasked_seconds > 0 and not self._check_problem:
                failures = 0
                await sleep_together(unasked_seconds, probe.interval_seconds / _TIMES_AN_INTERVAL)
                continue
            started = monotonic()
            problem = await self._ask(probe.timeout_seconds)
            if problem and monotonic() - started > 2 * probe.timeout_seconds:
                # This process stood still, not the worker.
                continue
            failures = failures + 1 if problem else 0
            self._set_check_problem(problem)
            # After a pause of this process every call has timed out: one failure proves nothing.
            if failures > 1 and self.silent_seconds >= probe.hung_seconds:
                self._calls.interrupt(self.silent_seconds)
            interval_seconds = probe.interval_seconds * min(_RAREST, 1 + failures // _MANY_FAILURES)
            await asyncio.sleep(max(0.0, started + interval_seconds - monotonic()))

    async def _ask(self, timeout_seconds: float) -> str:
        try:
            request = health_pb2.HealthCheckRequest()
            response = await unary(self._stub.Check(request, timeout=timeout_seconds, wait_for_ready=False))
        except DeadlineExceeded as error:
            return "" if self._calls.go_on() else f"its health check failed: {error.message}"
        except BatonError as error:
            return f"its health check failed: {error.message}"
        self.heard()
        return "" if response.status == _SERVING else _NOT_SERVING

    def _set_watch_problem(self, problem: str) -> None:
        if problem != self._watch_problem:
            self._watch_problem = problem
            self._update()

    def _set_check_problem(self, problem: str) -> None:
        if problem != self._check_problem:
            self._check_problem = problem
            self._update()

    def _resume(self) -> None:
        self._fault_problem = ""
        self._update()

    def _update(self) -> None:
        self.problem = self._watch_problem or self._check_problem or self._card_problem or self._fault_problem
        self._changed()
