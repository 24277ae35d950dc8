"""One worker as the router sees it: its stubs, its health, and its load."""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from baton.calls import stream, unary
from baton.engine.v1 import (
    decode_pb2_grpc,
    handoff_pb2_grpc,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.errors import BatonError, EngineFailed, Unavailable
from baton.inference.v1 import cluster_service_pb2
from discovery.backoff import Backoff
from discovery.record import LORA, MULTIPLEX
from discovery.registry import WorkerRecord
from engine_protocol.multiplex.channel import multiplexed, separate
from engine_protocol.multiplex.peer_stream import StreamDialer
from router.config import ProbeConfig
from router.routing.latency import WorkerLatency
from router.routing.policy import KnownLoras
from router.routing.scoring import Ranks
from router.text.served_model import ServedModel
from router.workers.loras import watch_loras
from router.workers.watching.health import WorkerHealth
from router.workers.watching.report_stream import CorrectedLoad, ReportStream
from router.workers.watching.waiting_calls import Backlog, WaitingCalls
from rpc.channels import Dial
from runtime.aio import TaskGroup
from runtime.clock import monotonic
from runtime.lasting import lasting

# Of the interval of health checks: a report that is a little late still spares one.
_REPEATED_WITHIN = 0.7
# Of those that retain blocks of a worker, so many are told to operators.
_MOST_TENANTS = 16

Stub = TypeVar("Stub")
LoadCard = Callable[[worker_pb2.ModelCard], "asyncio.Future[ServedModel]"]


class WorkerHandle:
    """A worker of one epoch. Created by `connect`; its stubs may be used until `idle`, also after it has left.

    It is ready while its card is known and its health says so. `leaving` is set when it has left the cluster.
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
        self.shared_control = worker_pb2_grpc.WorkerServiceStub(shared)
        self.model: ServedModel | None = None
        self.load = cluster_service_pb2.WorkerLoad()
        self.wake_seconds = 0.0
        self.loras = KnownLoras()
        self.latency = WorkerLatency()
        self.ranks = Ranks(record.worker_id, record.data_parallel_ranks)
        self.refusals = 0  # of requests in a row, which only an engine can know to be wrong
        self.doubted_at = -math.inf
        self.calls = WaitingCalls(self._backlog)
        self.health = WorkerHealth(record.worker_id, channel, self.calls, changed)
        self._changed = changed
        self._load_at = monotonic()
        self._requests, self._waiting_tokens = CorrectedLoad(), CorrectedLoad()
        # Prompt tokens that wait there for other routers. One report alone may still count what has ended here.
        self.others_tokens = self._others_tokens_at_load = 0
        self._users = 0
        self._is_closed = False
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
        """The reason that it cannot be used now; empty if it is ready."""
        return self.health.problem

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
        """Keeps the channel open, even if the worker leaves the cluster. Raises Unavailable once it is closed."""
        self.add_user()
        try:
            yield
        finally:
            self.remove_user()

    def add_user(self) -> None:
        """Keeps the channel open until `remove_user`. Raises Unavailable if it is closed, or about to be.

        A call that began on it would be cancelled.
        """
        if self._is_closed:
            raise Unavailable(f"worker {self.record.worker_id} has left")
        if not self._users:
            self._idle.clear()
        self._users += 1

    def remove_user(self) -> None:
        """Undoes `add_user`."""
        self._users -= 1
        if not self._users:
            self._idle.set()

    async def idle(self) -> None:
        """Waits until `keep_open` is left by all. The channel is then closed, and takes no further user."""
        while self._users:  # another may have come before this goes on
            await self._idle.wait()
        self._is_closed = True

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
                            self.health.heard()
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
                self.health.set_card_problem(f"its model card cannot be read: {error.message}")
                await asyncio.sleep(backoff.next_seconds())
        self.health.set_card_problem("")

    def _backlog(self) -> Backlog:
        return Backlog(self.record, self.load.waiting, self.waiting_tokens, self.wake_seconds)

    def _set_load(self, load: cluster_service_pb2.WorkerLoad) -> None:
        del load.retained[_MOST_TENANTS:]
        before, self.load = self.load.shed, load
        if load.shed != before:
            self._changed()
        self.wake_seconds = load.wake.ToNanoseconds() / 1e9 if load.HasField("wake") else 0.0
        self._load_at = monotonic()
        self._requests.reported(load.running + load.waiting)
        self._waiting_tokens.reported(load.waiting_prefill_tokens)
        before, self._others_tokens_at_load = self._others_tokens_at_load, max(0, self._waiting_tokens.elsewhere)
        self.others_tokens = min(before, self._others_tokens_at_load)


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
                "worker_health": worker.health.watch,
                "worker_checks": partial(worker.health.check, probe),
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
