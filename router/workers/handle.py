"""One worker as the router sees it: its stubs, its health, and its load."""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import structlog
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.calls import stream, unary
from baton.engine.v1 import (
    decode_pb2_grpc,
    handoff_pb2_grpc,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.errors import BatonError, EngineFailed, InvalidReply, Unavailable
from baton.inference.v1 import cluster_service_pb2
from discovery.backoff import Backoff
from discovery.record import LORA, MULTIPLEX, MULTIPLEXED_LOAD
from discovery.registry import WorkerRecord
from engine_protocol.multiplex.channel import multiplexed, separate
from engine_protocol.multiplex.peer_stream import StreamDialer
from router.config import ProbeConfig
from router.routing.known_loras import KnownLoras
from router.routing.latency import WorkerLatency
from router.routing.scoring import Ranks
from router.text.served_model import ServedModel
from router.workers.watching.corrected_load import CorrectedLoad
from router.workers.loras import watch_loras
from router.workers.watching.report_stream import ReportStream
from rpc.channels import Dial
from runtime.aio import TaskGroup, cancellations, sleep_together, uncancel
from runtime.clock import monotonic
from runtime.lasting import lasting

log = structlog.get_logger(__name__)

_NOT_CHECKED = "its health check has not answered yet"
_NO_CARD = "its model card has not been read yet"
# Of the interval of health checks: a report that is a little late still spares one.
_REPEATED_WITHIN = 0.7
# The times at which health checks may be due, of all workers together: an idle router sleeps in between.
_TIMES_AN_INTERVAL = 4
# How long a worker gets no requests whose replies were wrong, at first and at most; then how long that counts.
_FIRST_SUSPENSION_SECONDS, _LONGEST_SUSPENSION_SECONDS = 2.0, 60.0
_FORGIVEN_SECONDS = 300.0
# A worker may be busy with what it has: how much longer it may take to answer for each request that waits there, up to
# so many, and for each token that is computed before.
_MOST_WAITING = 8
_SLOW_TOKENS_PER_SECOND = 200.0
# Calls that are asked in one look whether another worker could answer them, which takes some time.
_ASKED_AT_ONCE = 16
_SERVING = health_pb2.HealthCheckResponse.SERVING

Stub = TypeVar("Stub")
LoadCard = Callable[[worker_pb2.ModelCard], "asyncio.Future[ServedModel]"]


class Waiting:
    """A request as a worker knows it that it has called: how long it waits for the answer.

    `awaits_answer` is set while it waits; `asked_at` is then None until it was looked at, `tokens` are what the call
    computes before it answers. Attributes, since requests set them with each call.
    """

    asked_at: float | None = None
    awaits_answer = False
    tokens = 0

    def answer_seconds(self) -> float:
        """The seconds that an idle worker may take to answer."""
        raise NotImplementedError

    def another_can(self, worker: "WorkerHandle") -> bool:
        """True if another worker could answer instead of this one."""
        raise NotImplementedError


class WorkerHandle:
    """A worker of one epoch. Created by `connect`; its stubs may be used until `idle`, also after it has left.

    It is ready while its card is known and both health checks say so: Watch pushes changes, and repeated Checks
    detect a hung process. `leaving` is set when it has left the cluster.
    """

    def __init__(
        self, record: WorkerRecord, channel: aio.Channel, shared: aio.Channel, changed: Callable[[], None]
    ) -> None:
        """`shared` is for the calls of requests."""
        self.record = record
        self._channel = channel
        self._stubs: dict[Any, Any] = {}
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(shared)
        self.decode = decode_pb2_grpc.DecodeServiceStub(shared)
        self.handoff = handoff_pb2_grpc.HandoffServiceStub(shared)
        self.control = worker_pb2_grpc.WorkerServiceStub(channel)
        # Reports come ten times a second while it works, and each cancelled request has an abort. A call of grpc.aio
        # takes several times as long, and thousands of them fragment the process's memory.
        sharing = shared if MULTIPLEXED_LOAD in record.capabilities else channel
        self.shared_control = worker_pb2_grpc.WorkerServiceStub(sharing)
        self.model: ServedModel | None = None
        self.load = cluster_service_pb2.WorkerLoad()
        self.loras = KnownLoras()
        self.latency = WorkerLatency()
        self.ranks = Ranks(record.worker_id, record.data_parallel_ranks)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._changed = changed
        self._watch_problem = self._check_problem = _NOT_CHECKED
        self._card_problem = _NO_CARD
        self._fault_problem = ""
        self._suspensions = Backoff(_FIRST_SUSPENSION_SECONDS, _LONGEST_SUSPENSION_SECONDS)
        self._suspended_until = -math.inf
        self._load_at = self._heard_at = monotonic()
        self._calls: dict[_Interruptible, None] = {}
        self._requests, self._waiting_tokens = CorrectedLoad(), CorrectedLoad()
        # Prompt tokens that wait there for other routers. One report alone may still count what has ended here.
        self.others_tokens = self._others_tokens_at_load = 0
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.leaving = asyncio.Event()
        self.unpaired = ""  # why no other worker of its model fits it for a handoff; empty if one does

    def stub(self, kind: Callable[[aio.Channel], Stub]) -> Stub:
        """The stub of a service that is not called for each request of a client."""
        if kind not in self._stubs:
            self._stubs[kind] = kind(self._channel)
        found: Stub = self._stubs[kind]
        return found

    @property
    def embedding_layout(self) -> str:
        """The layout of the embeddings that it makes or reads; empty if unknown."""
        return self.model.images.embedding_layout_digest if self.model and self.model.images else ""

    @property
    def encoder(self) -> str:
        """The fingerprint of the encoder that makes its embeddings; empty if unknown."""
        return self.model.images.encoder_fingerprint if self.model and self.model.images else ""

    @property
    def problem(self) -> str:
        """Why it cannot be used now; empty if it is ready."""
        return self._watch_problem or self._check_problem or self._card_problem or self._fault_problem

    @property
    def state(self) -> Literal["ready", "unhealthy", "draining"]:
        """Its state in one word."""
        if self.record.draining:
            return "draining"
        return "unhealthy" if self.problem else "ready"

    @property
    def requests(self) -> int:
        """The requests that it reported, corrected by those that this router has sent or seen end since."""
        return self._requests.value

    @property
    def waiting_tokens(self) -> int:
        """The queued prompt tokens that it reported, corrected like `requests`."""
        return self._waiting_tokens.value

    @property
    def token_seconds(self) -> float | None:
        """The recent inter-token latency of this router's requests there; None if unknown."""
        return self.latency.recent_token_seconds.value

    @property
    def load_age_seconds(self) -> float:
        """The age of the reported load."""
        return monotonic() - self._load_at

    @contextmanager
    def track_load(self, prompt_tokens: int) -> Iterator[None]:
        """Counts a request, and the prompt tokens that it computes, as load while the context is open."""
        self.add_load(prompt_tokens)
        try:
            with self.keep_open():
                yield
        finally:
            self.remove_load(prompt_tokens)

    def add_load(self, prompt_tokens: int) -> None:
        """Counts a request until `remove_load`, for callers that keep the channel open themselves."""
        self._requests.add(1)
        if prompt_tokens:
            self._waiting_tokens.add(prompt_tokens)

    def remove_load(self, prompt_tokens: int) -> None:
        """Undoes `add_load`."""
        self._requests.remove(1)
        if prompt_tokens:
            self._waiting_tokens.remove(prompt_tokens)

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keeps the channel open, even if the worker leaves the cluster."""
        self.add_user()
        try:
            yield
        finally:
            self.remove_user()

    def add_user(self) -> None:
        """Keeps the channel open until `remove_user`."""
        self._users += 1
        self._idle.clear()

    def remove_user(self) -> None:
        """Undoes `add_user`."""
        self._users -= 1
        if not self._users:
            self._idle.set()

    def fail_if_hung(self, waiting: Waiting | None = None) -> "_Interruptible":
        """Stops the body of `with` with Unavailable if the worker is found to hang.

        With `waiting` it raises InvalidReply if there is no answer for too long, and another worker could give it.
        """
        return _Interruptible(self, waiting)

    def begin_waiting(self, call: "_Interruptible") -> None:
        """Adds a call that is interrupted if the worker is found to hang."""
        self._calls[call] = None

    def end_waiting(self, call: "_Interruptible") -> None:
        """Undoes `begin_waiting`."""
        self._calls.pop(call, None)

    @property
    def silent_seconds(self) -> float:
        """The seconds since it was last heard of."""
        return monotonic() - self._heard_at

    def mark_unhealthy(self, problem: str) -> None:
        """Marks it unhealthy until its next health check succeeds."""
        self._check_problem = problem
        self._changed()

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
        log.warning("worker suspended", worker_id=self.record.worker_id, seconds=round(seconds, 1), problem=problem)
        asyncio.get_running_loop().call_later(seconds, self._resume)
        self._changed()

    def _resume(self) -> None:
        self._fault_problem = ""
        self._changed()

    async def idle(self) -> None:
        """Waits until `keep_open` is left by all."""
        await self._idle.wait()

    async def watch_health(self) -> None:
        """Follows the health that the worker reports, until cancelled."""
        backoff = Backoff()
        while True:
            try:
                call = self._health.Watch(health_pb2.HealthCheckRequest())
                async with aclosing(stream(call)) as responses:
                    async for response in responses:
                        backoff.reset()
                        serving = response.status == _SERVING
                        self._set_watch_problem("" if serving else "it reports that it is not serving")
                self._set_watch_problem("its health stream ended")
            except BatonError as error:
                self._set_watch_problem(f"its health stream failed: {error.message}")
            await asyncio.sleep(backoff.next_seconds())

    async def check_health(self, probe: ProbeConfig) -> None:
        """Checks the health repeatedly, until cancelled: a hung process reports nothing.

        One that has reported its load within the interval does not hang, and is not asked: only a worker of a version
        that does not repeat its reports, or one that is late, is.
        """
        failures = 0
        while True:
            self._interrupt_unanswered()
            unasked_seconds = probe.interval_seconds - self.silent_seconds
            if unasked_seconds > 0 and not self._check_problem:
                failures = 0
                await sleep_together(unasked_seconds, probe.interval_seconds / _TIMES_AN_INTERVAL)
                continue
            started = monotonic()
            problem = await self._check(probe.timeout_seconds)
            if problem and monotonic() - started > 2 * probe.timeout_seconds:
                # This process stood still, not the worker.
                continue
            failures = failures + 1 if problem else 0
            self._set_check_problem(problem)
            # After a pause of this process every call has timed out: one failure proves nothing.
            if failures > 1 and self.silent_seconds >= probe.hung_seconds:
                self._interrupt()
            await asyncio.sleep(max(0.0, started + probe.interval_seconds - monotonic()))

    async def watch_load(self, probe: ProbeConfig) -> None:
        """Follows the load that the worker reports, until cancelled. It also reports that nothing has changed."""
        backoff = Backoff()
        repeat_after = Duration()
        repeat_after.FromNanoseconds(int(probe.interval_seconds * _REPEATED_WITHIN * 1e9))
        request = worker_pb2.WatchLoadRequest(repeat_after=repeat_after)
        with ReportStream("load", self.record.worker_id) as reports:
            while True:
                try:
                    async with aclosing(stream(self.shared_control.WatchLoad(request))) as responses:
                        async for response in responses:
                            backoff.reset()
                            self._heard_at = monotonic()
                            self._set_load(response.load)
                            reports.arrived()
                    reports.lost("the worker ended it")
                except BatonError as error:
                    # The health checks decide whether it is used. Until the next report only our own requests count.
                    reports.lost(error.message)
                await asyncio.sleep(backoff.next_seconds())

    def set_loras(self, loras: KnownLoras) -> None:
        """Notes the adapters that the worker has told of."""
        self.loras = loras
        self._changed()

    async def read_card(self, load_card: LoadCard) -> None:
        """Reads the model card, once."""
        backoff = Backoff()
        while self.model is None:
            try:
                response = await unary(self.control.GetModel(worker_pb2.GetModelRequest(), timeout=30.0))
                model = await load_card(response.card)
                if model.name != self.record.model:
                    raise EngineFailed(f"it is for {model.name!r:.100}, but the worker's record names another model")
                self.model = model
            except BatonError as error:
                self._set_card_problem(f"its model card cannot be read: {error.message}")
                await asyncio.sleep(backoff.next_seconds())
        self._set_card_problem("")

    def _interrupt(self) -> None:
        """Stops the calls that wait for it: they may continue elsewhere."""
        for call in tuple(self._calls):
            call.interrupt()
        self._calls.clear()

    def _interrupt_unanswered(self) -> None:
        """Stops calls that have waited too long for their answers, and that another worker could answer."""
        now, left = monotonic(), _ASKED_AT_ONCE
        for call in tuple(self._calls):
            waiting = call.waiting
            if waiting is None or not waiting.awaits_answer:
                continue
            if waiting.asked_at is None:
                waiting.asked_at = now
            elif now > self._due(waiting, waiting.asked_at) and left:
                left -= 1
                if waiting.another_can(self):
                    self._calls.pop(call, None)
                    call.interrupt(f"no answer for {now - waiting.asked_at:.1f} s")
                else:
                    waiting.asked_at = now  # looked at again after as long

    def _due(self, waiting: Waiting, asked_at: float) -> float:
        """When a worker that is well has answered, as far as can be told from what waits there."""
        tokens = waiting.tokens + min(self.waiting_tokens, _MOST_WAITING * max(waiting.tokens, 1024))
        requests = min(self.load.waiting, _MOST_WAITING)
        return asked_at + waiting.answer_seconds() * (1 + requests) + tokens / _SLOW_TOKENS_PER_SECOND

    async def _check(self, timeout_seconds: float) -> str:
        try:
            request = health_pb2.HealthCheckRequest()
            response = await unary(self._health.Check(request, timeout=timeout_seconds, wait_for_ready=False))
        except BatonError as error:
            return f"its health check failed: {error.message}"
        self._heard_at = monotonic()
        return "" if response.status == _SERVING else "it reports that it is not serving"

    def _set_watch_problem(self, problem: str) -> None:
        if problem != self._watch_problem:
            self._watch_problem = problem
            self._changed()

    def _set_check_problem(self, problem: str) -> None:
        if problem != self._check_problem:
            self._check_problem = problem
            self._changed()

    def _set_card_problem(self, problem: str) -> None:
        if problem != self._card_problem:
            self._card_problem = problem
            self._changed()

    def _set_load(self, load: cluster_service_pb2.WorkerLoad) -> None:
        before, self.load = self.load.shed, load
        if load.shed != before:
            self._changed()
        self._load_at = monotonic()
        self._requests.reported(load.running + load.waiting)
        self._waiting_tokens.reported(load.waiting_prefill_tokens)
        before, self._others_tokens_at_load = self._others_tokens_at_load, max(0, self._waiting_tokens.elsewhere)
        self.others_tokens = min(before, self._others_tokens_at_load)


class _Interruptible:
    """The context of `fail_if_hung`. Not an asyncio.timeout, which makes twice the calls: each request has two."""

    __slots__ = ("_cancelled_before", "_is_interrupted", "_reason", "_task", "_worker", "waiting")

    _task: "asyncio.Task[Any]"
    _cancelled_before: int

    def __init__(self, worker: WorkerHandle, waiting: Waiting | None) -> None:
        self.waiting = waiting
        self._worker = worker
        self._is_interrupted = False
        self._reason = ""

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelled_before = task, cancellations(task)
        self._worker.begin_waiting(self)

    def interrupt(self, reason: str = "") -> None:
        """Stops what waits for the worker: it hangs, or `reason`."""
        self._is_interrupted = True
        self._reason = reason
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.end_waiting(self)
        if not self._is_interrupted or uncancel(self._task) > self._cancelled_before:
            return
        if isinstance(error, asyncio.CancelledError):
            if self._reason:
                raise InvalidReply(self._reason) from None
            raise Unavailable(f"no response for {self._worker.silent_seconds:.1f} s") from None


@asynccontextmanager
async def connect(
    record: WorkerRecord,
    dial: Dial,
    probe: ProbeConfig,
    load_card: LoadCard,
    changed: Callable[[], None],
    stream_dialer: StreamDialer | None = None,
) -> AsyncGenerator[WorkerHandle, None]:
    """Watches a worker while the context is open. At the end waits for the calls that still run there.

    With `stream_dialer` the calls of requests share a stream, if the worker offers that.
    """
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(dial(record.address))
        shared = separate(channel)
        if MULTIPLEX in record.capabilities and stream_dialer:
            open_stream = stream_dialer(record.address, channel)
            shared = await stack.enter_async_context(multiplexed(channel, open_stream))
        worker = WorkerHandle(record, channel, shared, changed)
        async with TaskGroup() as group:
            watches: dict[str, Callable[[], Awaitable[None]]] = {
                "worker_health": worker.watch_health,
                "worker_checks": partial(worker.check_health, probe),
                "worker_load": partial(worker.watch_load, probe),
                "worker_card": partial(worker.read_card, load_card),
            }
            if LORA in record.capabilities:
                watches["worker_loras"] = partial(watch_loras, record.worker_id, worker.control, worker.set_loras)
            tasks = [group.create_task(lasting(name, watch)) for name, watch in watches.items()]
            try:
                yield worker
            finally:
                for task in tasks:
                    task.cancel()
                worker.leaving.set()
        await worker.idle()
