"""A decode that has yielded, until the next one of its answer gives a token: where it goes on, and what that took."""

from router.moving.decodes import ReadDecode
from router.placement.placer import Placer
from router.telemetry import metrics
from router.workers.handle import WorkerHandle
from rpc.tracing.span import current_span
from runtime.clock import perf_counter


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
