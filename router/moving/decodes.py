"""The decodes that this router reads, by their workers, and how far each has come.

A decode that has yielded, until the next one of its answer gives a token: where it goes on, and what that took.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.v1 import prompt_pb2
from discovery.record import MOVES_DECODES
from router.context import RequestContext
from router.placement.placer import Placer
from router.routing.policy import RoutingRequest
from router.telemetry import metrics
from router.workers.handle import WorkerHandle
from rpc.tracing.span import Span, current_span
from runtime.clock import perf_counter

if TYPE_CHECKING:
    from router.text.completion import Completion
    from router.workers.calls import WorkerCalls


@dataclass(slots=True, eq=False)
class ReadDecode:
    """One decode that is read. `target` is the worker that a move wants it to go on on, once it has yielded."""

    worker: WorkerHandle
    ctx: RequestContext
    request: RoutingRequest
    prompt: prompt_pb2.Prompt  # without embeddings
    completion: "Completion"
    calls: "WorkerCalls"
    target: WorkerHandle | None = None
    move: "asyncio.Task[None] | None" = None
    not_before: float = 0.0  # of the monotonic clock: a move has failed
    ended: asyncio.Event | None = None  # for who waits
    span: Span = field(default_factory=current_span)  # of its call

    @property
    def emitted(self) -> Sequence[int]:
        """The ids of the answer that the router has."""
        return self.completion.token_ids

    @property
    def num_tokens(self) -> int:
        """The ids of the prompt and of the answer."""
        return self.request.prompt_tokens + len(self.emitted)

    @property
    def tokens_left(self) -> int:
        """The most that it may still generate."""
        return self.completion.sampling.stop.max_tokens - len(self.emitted)


class ReadDecodes:
    """The decodes that this router reads on workers that can give them away."""

    def __init__(self) -> None:
        self.by_worker: dict[WorkerHandle, dict[ReadDecode, None]] = {}

    def add(self, decode: ReadDecode) -> None:
        """Lets a decode be moved until it is discarded, if its worker can give it away."""
        if MOVES_DECODES in decode.worker.record.capabilities:
            self.by_worker.setdefault(decode.worker, {})[decode] = None

    def discard(self, decode: ReadDecode) -> None:
        """Notes that a decode is not read any more. A move of it that only copies by then ends."""
        decodes = self.by_worker.get(decode.worker)
        if decodes is None or decode not in decodes:
            return
        del decodes[decode]
        if not decodes:
            del self.by_worker[decode.worker]
        if decode.ended is not None:
            decode.ended.set()

    async def ended(self, decode: ReadDecode) -> None:
        """Waits until a decode is not read any more."""
        if decode in self.by_worker.get(decode.worker, ()):
            decode.ended = decode.ended or asyncio.Event()
            await decode.ended.wait()
            if decode.move is not None and decode.target is None:
                decode.move.cancel()


class Yielded:
    """The end of `decode` on its worker. `has_kv` says whether the decode that follows has its KV."""

    def __init__(self, decode: ReadDecode, placer: Placer) -> None:
        self.has_kv = False
        self._placer = placer
        self._request = decode.request
        self._target = decode.target  # the worker that was warmed for it, if there is one
        self._tried: frozenset[str] = frozenset()  # the processes that could not go on with it; WorkerRecord.process
        self._source = decode.worker
        self._tokens = decode.num_tokens
        self._at = perf_counter()

    def reader(self) -> WorkerHandle | None:
        """The worker that goes on with it: the one chosen for it, or another one."""
        tried = self._tried | {self._source.record.process}
        targets = self._placer.move_targets(self._request, self._tokens + 1, self._source, tried)
        if self._target in targets:
            return self._target
        return self._placer.choose(self._request, targets) if targets else None

    def next_reader(self, failed: WorkerHandle, *, is_lost: bool) -> WorkerHandle | None:
        """The next worker to take its KV over: another one, or its own; None once that has failed, too.

        If it is lost, as far as `failed` could tell, perhaps only the way to it is: its own worker knows.
        """
        if failed is self._source:
            return None
        self._tried |= {failed.record.process}
        return self._source if is_lost else self.reader() or self._source

    def went_on(self, worker: WorkerHandle) -> bool:
        """Records that `worker` has given the next token. True if the decode was moved there with its KV."""
        outcome = "recomputed"
        if self.has_kv:
            outcome = "returned" if worker is self._source else "moved"
        now = perf_counter()
        metrics.MOVES.labels(outcome).inc()
        metrics.MOVE_PAUSE_SECONDS.observe(now - self._at)
        current_span().stage(
            "migrated",
            self._at,
            now,
            {
                "baton.move.source": self._source.record.worker_id,
                "baton.move.target": worker.record.worker_id,
                "baton.move.outcome": outcome,
                "baton.move.tokens": self._tokens,
            },
        )
        return outcome == "moved"
