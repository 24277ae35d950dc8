"""Admits requests to the workers: within quotas, when there is room, and if the deadline can be met."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

from baton.engine.v1 import peer_pb2
from baton.errors import DeadlineUnreachable, QuotaExceeded, QuotaUnavailable
from baton.inference.v1 import timing_pb2
from router.admission.fair_queue import FairQueue
from router.admission.lanes import Ticket
from router.admission.ledger import THIS_ROUTER
from router.admission.peers import ALONE, Peers
from router.admission.places import PlaceLenders, SharedPlaces, key_of
from router.admission.predictor import Fleet, LatencyPredictor, RequestEstimate
from router.admission.queue import AdmissionQueue
from router.admission.quotas import Quotas
from router.config import AdmissionConfig, Fairness
from router.context import Deadline, RequestContext
from router.routing.latency import Clock
from router.telemetry import metrics
from runtime.aio import timeout
from runtime.clock import monotonic, perf_counter

_GENERATING = "decode"  # the role whose speed is predicted
_UNLIMITED: AbstractAsyncContextManager[None] = nullcontext()
_WATCH_SECONDS = 5.0
# An ask waits so long for others to join it.
_GATHERED_SECONDS = 0.002
_NOT_HOME = peer_pb2.PlacesLoan(not_home=True)


class ChangingFleet(Fleet, Protocol):
    """A fleet whose workers change."""

    @property
    def version(self) -> int:
        """Another number after each change of the workers, their records or their health."""

    async def change(self) -> None:
        """Waits for the next change of the records or of a worker's health."""


class AdmissionController:
    """One queue for each model and role. Without a concurrency limit no request waits.

    `follow` must run while requests come: it admits waiting requests when workers join or become healthy; with `peers`
    also `share`, which borrows places from them.
    """

    def __init__(
        self,
        fleet: ChangingFleet,
        config: AdmissionConfig,
        quotas: Quotas,
        clock: Clock = monotonic,
        *,
        fairness: Fairness = "none",
        peers: Peers = ALONE,
    ) -> None:
        self.quotas = quotas
        self._fleet = fleet
        self._config = config
        self.clock = clock
        self._fairness = fairness
        self._peers = peers
        self._predictor = LatencyPredictor(fleet, clock)
        self._queues: dict[tuple[str, str], AdmissionQueue] = {}
        self._places: dict[tuple[str, str], SharedPlaces] = {}
        self._lenders = PlaceLenders(clock)
        self._needs_places = asyncio.Event()
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

    @property
    def queues(self) -> Iterable[AdmissionQueue]:
        """Those of all models and roles that are in use."""
        return self._queues.values()

    async def watch_tenants(self) -> None:
        """Measures how long tenants wait, until cancelled."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            orders = [queue.order for queue in self._queues.values() if queue.order.tells_tenants]
            waiting = [(order, tenant) for order in orders for tenant in order.waiting()]
            metrics.WAITING_TENANTS.set(len(waiting))
            metrics.LONGEST_TENANT_WAIT.set(max((order.longest_wait(one) for order, one in waiting), default=0.0))
            metrics.STARVING_TENANTS.set(sum(order.starving() for order in orders if order.count))

    async def share(self) -> None:
        """Asks the homes for places, and gives back what is not needed, until cancelled."""
        while True:
            await self.ask_due()
            wait = min((places.due_at for places in self._places.values()), default=math.inf) - self.clock()
            self._needs_places.clear()
            try:
                async with timeout(min(1.0, max(_GATHERED_SECONDS, wait))):
                    await self._needs_places.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_GATHERED_SECONDS)

    async def ask_due(self) -> None:
        """Asks the homes for places once, where that is due."""
        now = self.clock()
        if self._peers.count == 1:
            # No answer of a home wakes what waits.
            for queue in self._queues.values():
                queue.update()
        due = [key for key, places in self._places.items() if places.is_due(now)]
        if due:
            await asyncio.gather(*(self._ask_places(*key) for key in due))

    def routers_changed(self) -> None:
        """Tells the homes soon what this router holds, or uses what is its own now."""
        for places in self._places.values():
            places.changed()
        self._needs_places.set()

    async def _ask_places(self, model: str, role: str) -> None:
        lend = partial(self.lend_places, THIS_ROUTER, routers=self._peers.routers)
        await self._places[model, role].ask(self._queues[model, role], model, role, lend)

    def lend_places(self, borrower: str, ask: peer_pb2.PlacesAsk, routers: frozenset[str]) -> peer_pb2.PlacesLoan:
        """Lends places to one of these routers, if this one is their home."""
        key = key_of(ask.model, ask.role)
        limit = self._limit(ask.model, ask.role)
        if not limit or self._peers.home(key) != THIS_ROUTER:
            return _NOT_HOME
        lender = self._lenders.of(key, self._peers.home_since(key))
        own = self._queues.get((ask.model, ask.role))
        # While it was alone it asked for none.
        lender.hold_here(max(own.running, self._places[ask.model, ask.role].held) if own is not None else 0)
        loan = lender.lend(borrower, ask, limit, routers)
        if borrower != THIS_ROUTER and own is not None and own.waiting:
            self._places[ask.model, ask.role].changed()  # it may have given back what this router waits for
        return loan

    def track_tenant(self, ctx: RequestContext, requests: int = 1) -> AbstractAsyncContextManager[None]:
        """Counts a request, and the tokens it generates, for its tenant. Raises QuotaExceeded when it is entered.

        `requests` is 0 for one that its worker still has, so that it was counted before. One that is computed again
        counts: only its client says that it was asked before.
        """
        return _UNLIMITED if self.quotas.is_unlimited else self._track_tenant(ctx, requests)

    @asynccontextmanager
    async def _track_tenant(self, ctx: RequestContext, requests: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as tracking:
            try:
                remaining = ctx.deadline.remaining_seconds
                await tracking.enter_async_context(self.quotas.track(ctx.qos.account, ctx.stats, requests, remaining))
            except (QuotaExceeded, QuotaUnavailable):
                # A refused request has gone through this stage; others go on to be validated in it.
                with ctx.stats.timings.measure(timing_pb2.STAGE_ADMISSION):
                    raise
            yield

    def admit(self, ctx: RequestContext, estimate: RequestEstimate) -> "Admission":
        """Entered by `async with`, waits until a request may run on workers, which it does while the context is open.

        Raises DeadlineUnreachable, QuotaExceeded, Overloaded if too many wait, and NoWorker if an outage lasts too
        long. A refused request is charged no tokens.
        """
        return Admission(self, ctx, estimate)

    @contextmanager
    def count_running(self, ctx: RequestContext, model: str) -> Iterator[None]:
        """Counts a request that runs on its worker already, and waits for nothing, while the context is open."""
        queue = self._queue(model, _GENERATING)
        ticket = queue.order.ticket(ctx.qos.account, ctx.qos.priority, 0, generates=True)
        queue.count_running(ticket)
        try:
            yield
        finally:
            queue.leave(ticket, None)

    async def enter(self, ctx: RequestContext, estimate: RequestEstimate) -> tuple[AdmissionQueue, Ticket]:
        """Queues a request as `admit` does. It leaves the returned queue, by its ticket, when it ends."""
        queue = self._queue(estimate.model, estimate.role)
        generates = estimate.role == _GENERATING
        ticket = queue.order.ticket(ctx.qos.account, ctx.qos.priority, estimate.prompt_tokens, generates=generates)
        predicts = self._config.predict_deadlines and ctx.deadline.is_callers
        if predicts:
            self._refuse_hopeless(estimate, ctx.deadline, queue.expected_seconds(ticket))
        if self.quotas.is_unlimited and queue.enter_now(ticket):
            metrics.QUEUE_SECONDS.observe(0.0)
            return queue, ticket
        with ctx.stats.timings.measure(timing_pb2.STAGE_ADMISSION):
            await self._enter(ctx, estimate, queue, ticket, predicts)
        return queue, ticket

    def learn(self, ctx: RequestContext, estimate: RequestEstimate) -> None:
        """Learns from a complete request how long answers are."""
        if estimate.role == _GENERATING:
            self._predictor.learn(estimate, ctx.stats.completion_tokens)

    async def _enter(
        self, ctx: RequestContext, estimate: RequestEstimate, queue: AdmissionQueue, ticket: Ticket, predicts: bool
    ) -> None:
        """Waits until the queue counts the request as running."""
        if self.quotas.is_unlimited:
            await self._take_place(ctx, estimate, queue, ticket, predicts)
            return
        async with self.quotas.charge(ctx.qos.account, estimate.prompt_tokens, ctx.deadline.remaining_seconds):
            await self._take_place(ctx, estimate, queue, ticket, predicts)

    async def _take_place(
        self, ctx: RequestContext, estimate: RequestEstimate, queue: AdmissionQueue, ticket: Ticket, predicts: bool
    ) -> None:
        if not await _wait_in(queue, ticket) or not predicts:
            return
        try:
            self._refuse_hopeless(estimate, ctx.deadline, 0.0)
        except DeadlineUnreachable:
            queue.leave(ticket, None)
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
            self._forget_unused()
            places = SharedPlaces(self._peers, key_of(model, role), self._needs_places.set, self.clock)
            queue = AdmissionQueue(
                partial(self._limit, model, role),
                self._config.max_waiting,
                self._config.outage_seconds,
                order=FairQueue(self._fairness, self.clock),
                places=places,
                clock=self.clock,
            )
            self._queues[model, role], self._places[model, role] = queue, places
        return queue

    def _forget_unused(self) -> None:
        """Models come and go: do not keep the queues that are unused. Borrowed places are given back first."""
        for key, queue in list(self._queues.items()):
            if queue.is_unused and not self._places[key].held:
                del self._queues[key], self._places[key]

    def _limit(self, model: str, role: str) -> int | None:
        """The number of requests that may run, from the ready workers that complete them. None: any number."""
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


class Admission:
    """The context of `AdmissionController.admit`. Not a generator: each request has one."""

    __slots__ = ("_controller", "_ctx", "_entered", "_estimate", "_has_left", "_queue", "_ticket")

    _queue: AdmissionQueue
    _ticket: Ticket
    _entered: float

    def __init__(self, controller: AdmissionController, ctx: RequestContext, estimate: RequestEstimate) -> None:
        self._controller = controller
        self._ctx = ctx
        self._estimate = estimate
        self._has_left = False

    async def __aenter__(self) -> "Admission":
        self._queue, self._ticket = await self._controller.enter(self._ctx, self._estimate)
        self._entered = self._controller.clock()
        return self

    def leave(self) -> None:
        """Leaves the place to others before the context ends. Further calls do nothing."""
        if self._has_left:
            return
        self._has_left = True
        stats, seconds = self._ctx.stats, self._controller.clock() - self._entered
        cached = self._estimate.prompt_tokens if self._estimate.is_part else stats.cached_tokens
        self._queue.leave(self._ticket, seconds, cached, stats.completion_tokens)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._controller.learn(self._ctx, self._estimate)
        finally:
            self.leave()


async def _wait_in(queue: AdmissionQueue, ticket: Ticket) -> bool:
    """Returns whether the request had to wait."""
    if queue.enter_now(ticket):
        metrics.QUEUE_SECONDS.observe(0.0)
        return False
    started = perf_counter()
    try:
        await queue.enter(ticket)
    finally:
        metrics.QUEUE_SECONDS.observe(perf_counter() - started)
    return True
