"""One worker as a router sees it: its channel, whether it is well, how busy it is, and what was sent to it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Literal

from baton.engine.v1 import (
    decode_pb2_grpc,
    encode_pb2_grpc,
    handoff_pb2_grpc,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.inference.v1 import cluster_service_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from discovery.backoff import Backoff
from discovery.registry import WorkerRecord
from router.config import ProbeConfig
from router.model import ServedModel
from router.pace import Pace
from router.ranks import Ranks
from rpc.aio import TaskGroup, Timeout, timeout
from rpc.calls import stream, unary
from rpc.channels import Dial
from rpc.errors import BatonError, Unavailable

_NOT_CHECKED = "its health check has not answered yet"
_NO_CARD = "its model card has not been read yet"
_SERVING = health_pb2.HealthCheckResponse.SERVING

LoadCard = Callable[[worker_pb2.ModelCard], "asyncio.Future[ServedModel]"]


class Worker:
    """A worker of one epoch. Created by `connect`; its stubs may be used until `idle`, also after it has left.

    It is sent work only while its card is known and both ways of asking for its health say so: Watch pushes changes,
    Check notices a process that hangs. `leaving` is set when it has left the cluster.
    """

    def __init__(self, record: WorkerRecord, channel: aio.Channel, changed: Callable[[], None]) -> None:
        self.record = record
        self.encode = encode_pb2_grpc.EncodeServiceStub(channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(channel)
        self.handoff = handoff_pb2_grpc.HandoffServiceStub(channel)
        self.control = worker_pb2_grpc.WorkerServiceStub(channel)
        self.model: ServedModel | None = None
        self.load = cluster_service_pb2.WorkerLoad()
        self.pace = Pace()
        self.ranks = Ranks(record.worker_id, record.data_parallel_ranks)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._changed = changed
        self._watch_problem = self._check_problem = _NOT_CHECKED
        self._card_problem = _NO_CARD
        self._load_at = self._heard_at = time.monotonic()
        self._waiting: set[Timeout] = set()
        self._sent_requests = self._sent_requests_at_load = 0
        self._sent_tokens = self._sent_tokens_at_load = 0
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.leaving = asyncio.Event()

    @property
    def embedding_layout(self) -> str:
        """Of the embeddings that it makes or reads; empty if it does not say."""
        return self.model.images.embedding_layout_digest if self.model and self.model.images else ""

    @property
    def encoder(self) -> str:
        """The fingerprint of what makes its embeddings; empty if it does not say."""
        return self.model.images.encoder_fingerprint if self.model and self.model.images else ""

    @property
    def problem(self) -> str:
        """Why nothing should be sent to it now; empty if it is ready."""
        return self._watch_problem or self._check_problem or self._card_problem

    @property
    def state(self) -> Literal["ready", "unhealthy", "draining"]:
        """In one word."""
        if self.record.draining:
            return "draining"
        return "unhealthy" if self.problem else "ready"

    @property
    def requests(self) -> int:
        """What it reported, and what was sent or has ended here since."""
        reported = self.load.running + self.load.waiting
        return max(0, reported + self._sent_requests - self._sent_requests_at_load)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that it reported waiting, and what was sent or has ended here since."""
        return max(0, self.load.waiting_prefill_tokens + self._sent_tokens - self._sent_tokens_at_load)

    @property
    def token_seconds(self) -> float | None:
        """From token to token, of late, in the answers of this router; None if it is not known."""
        return self.pace.recent_token_seconds.value

    @property
    def load_age_seconds(self) -> float:
        """How old the reported load is."""
        return time.monotonic() - self._load_at

    @contextmanager
    def carrying(self, prompt_tokens: int) -> Iterator[None]:
        """Counts a request that is there, and `prompt_tokens` of a prompt that it has to compute."""
        self._sent_requests += 1
        self._sent_tokens += prompt_tokens
        try:
            with self.in_use():
                yield
        finally:
            self._sent_requests -= 1
            self._sent_tokens -= prompt_tokens

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the stubs usable, also after it has left."""
        self._users += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    @asynccontextmanager
    async def answering(self) -> AsyncGenerator[None, None]:
        """What runs inside is stopped, with Unavailable, once the worker is found to hang."""
        patience = timeout(None)
        try:
            async with patience:
                self._waiting.add(patience)
                try:
                    yield
                finally:
                    self._waiting.discard(patience)
        except TimeoutError:
            raise Unavailable(f"it has answered nothing for {self._silent_seconds:.1f} s") from None

    def suspect(self, problem: str) -> None:
        """Leaves it out until its next check answers: a call to it has just failed."""
        self._check_problem = problem
        self._changed()

    async def idle(self) -> None:
        """Waits until nothing runs or is held there for this router."""
        await self._idle.wait()

    async def watch_health(self) -> None:
        """Follows what the worker says of itself, for ever."""
        backoff = Backoff()
        while True:
            try:
                call = self._health.Watch(health_pb2.HealthCheckRequest())
                async with aclosing(stream(call)) as responses:
                    async for response in responses:
                        backoff.reset()
                        serving = response.status == _SERVING
                        self._note_watch("" if serving else "it says that it is not serving")
                self._note_watch("its health stream ended")
            except BatonError as error:
                self._note_watch(f"its health stream failed: {error.message}")
            await asyncio.sleep(backoff.next_seconds())

    async def check_health(self, probe: ProbeConfig) -> None:
        """Asks again and again, for ever: a process that hangs says nothing of itself."""
        failures = 0
        while True:
            started = time.monotonic()
            problem = await self._check(probe.timeout_seconds)
            if problem and time.monotonic() - started > 2 * probe.timeout_seconds:
                # It was this process that stood still, and not the worker.
                continue
            failures = failures + 1 if problem else 0
            self._note_check(problem)
            # One failure may be ours: after a pause of this process every call has timed out, and nobody else hangs.
            if failures > 1 and self._silent_seconds >= probe.hung_seconds:
                self._interrupt()
            await asyncio.sleep(max(0.0, started + probe.interval_seconds - time.monotonic()))

    async def watch_load(self) -> None:
        """Follows how busy the worker says it is, for ever."""
        backoff = Backoff()
        while True:
            try:
                async with aclosing(stream(self.control.WatchLoad(worker_pb2.WatchLoadRequest()))) as responses:
                    async for response in responses:
                        backoff.reset()
                        self._heard_at = time.monotonic()
                        self._note_load(response.load)
            except BatonError:
                # Its health tells whether it can be used; without news of its load only what was sent counts.
                pass
            await asyncio.sleep(backoff.next_seconds())

    async def read_card(self, load_card: LoadCard) -> None:
        """Reads the model card, once."""
        backoff = Backoff()
        while self.model is None:
            try:
                response = await unary(self.control.GetModel(worker_pb2.GetModelRequest(), timeout=30.0))
                self.model = await load_card(response.card)
            except BatonError as error:
                self._card_problem = f"its model card cannot be read: {error.message}"
                await asyncio.sleep(backoff.next_seconds())
        self._card_problem = ""
        self._changed()

    @property
    def _silent_seconds(self) -> float:
        return time.monotonic() - self._heard_at

    def _interrupt(self) -> None:
        """Ends what waits for its answers: it may go on elsewhere."""
        for patience in tuple(self._waiting):
            patience.reschedule(asyncio.get_running_loop().time())
        self._waiting.clear()

    async def _check(self, timeout_seconds: float) -> str:
        try:
            request = health_pb2.HealthCheckRequest()
            response = await unary(self._health.Check(request, timeout=timeout_seconds, wait_for_ready=False))
        except BatonError as error:
            return f"its health check failed: {error.message}"
        self._heard_at = time.monotonic()
        return "" if response.status == _SERVING else "it says that it is not serving"

    def _note_watch(self, problem: str) -> None:
        if problem != self._watch_problem:
            self._watch_problem = problem
            self._changed()

    def _note_check(self, problem: str) -> None:
        if problem != self._check_problem:
            self._check_problem = problem
            self._changed()

    def _note_load(self, load: cluster_service_pb2.WorkerLoad) -> None:
        self.load = load
        self._load_at = time.monotonic()
        self._sent_requests_at_load = self._sent_requests
        self._sent_tokens_at_load = self._sent_tokens


@asynccontextmanager
async def connect(
    record: WorkerRecord, dial: Dial, probe: ProbeConfig, load_card: LoadCard, changed: Callable[[], None]
) -> AsyncGenerator[Worker, None]:
    """A worker that is watched while the context is open. At its end what still runs there is waited for."""
    async with dial(record.address) as channel:
        worker = Worker(record, channel, changed)
        async with TaskGroup() as group:
            tasks = [
                group.create_task(worker.watch_health()),
                group.create_task(worker.check_health(probe)),
                group.create_task(worker.watch_load()),
                group.create_task(worker.read_card(load_card)),
            ]
            try:
                yield worker
            finally:
                for task in tasks:
                    task.cancel()
                worker.leaving.set()
        await worker.idle()
