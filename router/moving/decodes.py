"""The decodes that this router reads, by their workers, and how far each has come."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.v1 import prompt_pb2
from discovery.record import MOVES_DECODES
from router.context import RequestContext
from router.routing.policy import RoutingRequest
from router.workers.handle import WorkerHandle
from rpc.tracing.span import Span, current_span

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
    ended: asyncio.Event = field(default_factory=asyncio.Event)
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

    @contextmanager
    def reading(self, decode: ReadDecode) -> Iterator[None]:
        """Lets a decode be moved while the context is open. A move of it that only copies by then ends."""
        worker = decode.worker
        if MOVES_DECODES not in worker.record.capabilities:
            yield
            return
        decodes = self.by_worker.setdefault(worker, {})
        decodes[decode] = None
        try:
            yield
        finally:
            del decodes[decode]
            if not decodes:
                del self.by_worker[worker]
            decode.ended.set()
            if decode.move is not None and decode.target is None:
                decode.move.cancel()
