"""Admits requests to the workers: within quotas, when there is room, and if the deadline can be met."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Protocol

from baton.errors import DeadlineUnreachable, QuotaExceeded
from baton.inference.v1 import timing_pb2
from router.admission.predictor import Fleet, LatencyPredictor, RequestEstimate
from router.admission.queue import AdmissionQueue
from router.admission.quotas import Quotas
from router.config import AdmissionConfig
from router.context import Deadline, RequestContext
from router.routing.latency import Clock
from router.telemetry import metrics

_GENERATING = "decode"  # the role whose speed is predicted
_UNLIMITED: AbstractContextManager[None] = nullcontext()


class ChangingFleet(Fleet, Protocol):
    """A fleet whose workers change."""

    @property
    def version(self) -> int:
        """Another number after each change of the workers, their records or their health."""

    async def change(self) -> None:
        """Waits for the next change of the records or of a worker's health."""


class AdmissionController:
    """One queue for each model and role. Without a concurrency limit no request waits.

    `follow` must run while requests come: it admits waiting requests when workers join or become healthy.
    """

    def __init__(
        self, fleet: ChangingFleet, config: AdmissionConfig, quotas: Quotas, clock: Clock = time.monotonic
    ) -> None:
        self._quotas = quotas
        self._fleet = fleet
        self._config = config
        self.clock = clock
        self._predictor = LatencyPredictor(fleet, clock)
        self._queues: dict[tuple[str, str], AdmissionQueue] = {}
        # How many ready workers complete requests, as of a version of the fleet.
        self._able: dict[tuple[str, str], int] = {}
        self._able_at = -1

    async def follow(self) -> None:
        """Admits waiting requests when the workers change, until cancelled."""
        while True:
            for queue in self._queues.values():
                queue.update()
            await self._fleet.change()

    def waiting(self, model: str) -> int:
        """The number of waiting requests of a model."""
        return sum(queue.waiting for (name, _), queue in self._queues.items() if name == model)

    def track_tenant(self, ctx: RequestContext) -> AbstractContextManager[None]:
        """Counts a request, and the tokens it generates, for its tenant. Raises QuotaExceeded when it is entered."""
        return _UNLIMITED if self._quotas.is_unlimited else self._track_tenant(ctx)

    @contextmanager
    def _track_tenant(self, ctx: RequestContext) -> Iterator[None]:
        with ExitStack() as tracking:
            try:
                tracking.enter_context(self._quotas.track(ctx.qos.tenant, ctx.stats))
            except QuotaExceeded:
                # A refused request has gone through this stage; others go on to be validated in it.
                with ctx.timings.measure(timing_pb2.STAGE_ADMISSION):
                    raise
            yield

    def admit(self, ctx: RequestContext, estimate: RequestEstimate) -> "_Admission":
        """Entered by `async with`, waits until a request may run on workers, which it does while the context is open.

        Raises DeadlineUnreachable, QuotaExceeded, Overloaded if too many wait, and NoWorker if an outage lasts too
        long. A refused request is charged no tokens.
        """
        return _Admission(self, ctx, estimate)

    @contextmanager
    def count_running(self, model: str) -> Iterator[None]:
        """Counts a request that runs on its worker already, and waits for nothing, while the context is open."""
        queue = self._queue(model, _GENERATING)
        queue.count_running()
        try:
            yield
        finally:
            queue.leave(None)

    async def enter(self, ctx: RequestContext, estimate: RequestEstimate) -> AdmissionQueue:
        """See `admit`. The request leaves the queue that is returned when it ends."""
        queue = self._queue(estimate.model, estimate.role)
        with ctx.timings.measure(timing_pb2.STAGE_ADMISSION):
            await self._enter(ctx, estimate, queue)
        return queue

    def learn(self, ctx: RequestContext, estimate: RequestEstimate) -> None:
        """Learns from a complete request how long answers are."""
        if estimate.role == _GENERATING:
            self._predictor.learn(estimate, ctx.stats.completion_tokens)

    async def _enter(self, ctx: RequestContext, estimate: RequestEstimate, queue: AdmissionQueue) -> None:
        """Waits until the queue counts the request as running."""
        qos = ctx.qos
        predicts = self._config.predict_deadlines and ctx.deadline.is_callers
        if predicts:
            self._refuse_hopeless(estimate, ctx.deadline, queue.expected_seconds(qos.priority))
        with _UNLIMITED if self._quotas.is_unlimited else self._quotas.charge(qos.tenant, estimate.prompt_tokens):
            if not await _wait_in(queue, qos.priority) or not predicts:
                return
            try:
                self._refuse_hopeless(estimate, ctx.deadline, 0.0)
            except DeadlineUnreachable:
                queue.leave(None)
                raise

    def _refuse_hopeless(self, estimate: RequestEstimate, deadline: Deadline, waiting_seconds: float) -> None:
        running_seconds = self._predictor.seconds(estimate) if estimate.role == _GENERATING else None
        predicted = waiting_seconds + (running_seconds or 0.0)
        remaining = deadline.remaining_seconds
        if predicted <= remaining:
            return
        metrics.REFUSALS.labels(DeadlineUnreachable.reason).inc()
        raise DeadlineUnreachable(
            f"the request would take {predicted:.3g} s, but its deadline is in {remaining:.3g} s",
            retry_after_seconds=min(60.0, max(0.1, predicted - remaining)),
        )

    def _queue(self, model: str, role: str) -> AdmissionQueue:
        queue = self._queues.get((model, role))
        if queue is None:
            # Models come and go: do not keep the queues that are unused.
            self._queues = {name: kept for name, kept in self._queues.items() if not kept.is_unused}
            limit = partial(self._limit, model, role)
            config = self._config
            queue = AdmissionQueue(limit, config.max_waiting, config.outage_seconds, clock=self.clock)
            self._queues[model, role] = queue
        return queue

    def _limit(self, model: str, role: str) -> int | None:
        """How many requests may run, from the number of ready workers that complete them. None: any number."""
        most = self._config.max_running_per_worker
        if not most:
            return None
        version = self._fleet.version
        if version != self._able_at:
            self._able.clear()
            self._able_at = version
        able = self._able.get((model, role))
        if able is None:
            able = self._able[model, role] = self._count_able(model, role)
        return most * able

    def _count_able(self, model: str, role: str) -> int:
        able = [
            worker
            for worker in self._fleet.workers
            if worker.record.model == model
            and role in worker.record.roles
            and not worker.record.draining
            and not worker.problem
        ]
        return len(able)


class _Admission:
    """What `AdmissionController.admit` returns. Not a generator: each request has one."""

    __slots__ = ("_controller", "_ctx", "_entered", "_estimate", "_queue")

    _queue: AdmissionQueue
    _entered: float

    def __init__(self, controller: AdmissionController, ctx: RequestContext, estimate: RequestEstimate) -> None:
        self._controller = controller
        self._ctx = ctx
        self._estimate = estimate

    async def __aenter__(self) -> None:
        self._queue = await self._controller.enter(self._ctx, self._estimate)
        self._entered = self._controller.clock()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._controller.learn(self._ctx, self._estimate)
        finally:
            self._queue.leave(self._controller.clock() - self._entered)


async def _wait_in(queue: AdmissionQueue, priority: int) -> bool:
    """Returns whether the request had to wait."""
    if queue.enter_now():
        metrics.QUEUE_SECONDS.observe(0.0)
        return False
    started = time.perf_counter()
    try:
        await queue.enter(priority)
    finally:
        metrics.QUEUE_SECONDS.observe(time.perf_counter() - started)
    return True
