"""Compares a placed request with its prediction, and corrects the costs and the caches by what happened."""

from collections.abc import Iterable, Mapping
from typing import Generic

from baton.inference.v1 import timing_pb2
from router.routing.latency import Clock
from router.routing.policy import Prediction, RoutingRequest, W
from router.routing.prefix.cost import Costs, WorkerCost
from router.routing.prefix.prefix_caches import Cache, PrefixCaches
from router.routing.prefix.work import WorkTicket
from router.telemetry import metrics

# A loan that was given up counts as so many times as long.
_LATE = 2.0


class Forecast(Generic[W]):
    """The Progress of a request that was placed by prediction. Its prompt counts as work of its place until `close`."""

    __slots__ = (
        "_caches",
        "_clock",
        "_coming_to",
        "_cost",
        "_entry",
        "_has_first_token",
        "_link",
        "_loading",
        "_loan",
        "_matched",
        "_prediction",
        "_reader",
        "_request",
        "_started",
        "_ticket",
        "_work",
    )

    def __init__(
        self,
        caches: PrefixCaches,
        costs: Costs,
        request: RoutingRequest,
        prediction: Prediction[W],
        matched: Mapping[Cache, int],
        clock: Clock,
    ) -> None:
        self._caches = caches
        self._request = request
        self._prediction = prediction
        self._matched = matched
        self._clock = clock
        self._started = clock()
        self._cost = costs.of(prediction.runs_on.record)
        self._work = self._cost.ranks[prediction.rank]
        reader = costs.of(prediction.decode_worker.record)
        # Looked up now: a worker that leaves meanwhile would be known again, for good.
        peer, is_apart = prediction.load.peer, prediction.prefill_worker is not None
        self._loan = None if peer is None else costs.of(peer.record).loan_to(self._cost)
        self._link, self._entry = self._cost.link_to(reader) if is_apart else None, reader.entry
        decoding = reader.ranks[prediction.decode_rank]
        self._ticket: WorkTicket | None = costs.shares.give(
            self._work, decoding, prediction.uncached_tokens, prediction.prefill
        )
        self._has_first_token = False
        self._loading = prediction.load.seconds
        seconds = prediction.first_token + prediction.transfer + prediction.decode
        self._expect(prediction.runs_on, self._work.cache, seconds)
        self._reader: Cache | None = None  # the cache that the KV is still to arrive in
        self._coming_to: WorkerCost | None = None  # the worker that does not know of the request yet
        if prediction.prefill_worker is not None:
            self._coming_to = reader
            self._coming_to.coming += 1
            self._reader = decoding.cache
            self._expect(prediction.decode_worker, self._reader, seconds)

    def first_token(self, cached_tokens: int | None) -> None:
        if self._has_first_token or self._ticket is None:
            return
        self._has_first_token = True
        self._arrive()
        cached = self._prediction.cached_tokens if cached_tokens is None else cached_tokens
        tokens = self._request.prompt_tokens - cached
        for computed in self._work.queue.done(self._ticket, tokens, cached + tokens / 2, self._loading):
            # Each by itself would look as if the first one had taken all the time, and the others none.
            seconds = max(0.0, computed.seconds - computed.loading) / computed.prompts
            context = computed.looks_back / max(1, computed.tokens)
            self._cost.prefill.add(computed.tokens / computed.prompts, seconds, context)
        if cached_tokens is not None:
            self._correct(cached_tokens)
        actual = self._clock() - self._started
        if actual > 0:
            metrics.TTFT_PREDICTION_ERROR.observe(abs(actual - self._prediction.first_token) / actual)

    def found_cached(self, cached_tokens: int) -> None:
        if self._prediction.prefill_worker is None:
            self._correct(cached_tokens)

    def borrowed(self, tokens: int, seconds: float) -> None:
        peer, blocks = self._prediction.load.peer, self._request.blocks
        if peer is None or self._loan is None:
            return
        self._loading = max(0.0, seconds - self._prediction.wait)
        if tokens or seconds > peer.seconds:
            moved = min(tokens or peer.tokens, peer.tokens) / blocks.block_tokens * blocks.block_bytes
            # One that brought nothing would have taken longer: it ends when computing is as quick.
            pulling = max(0.0, seconds - peer.loading_seconds)
            self._loan.add(moved, pulling if tokens else _LATE * seconds)

    def peer_has_none(self) -> None:
        peer, blocks = self._prediction.load.peer, self._request.blocks
        if peer is not None and not self._caches.reports(peer.record.process):
            first = peer.num_blocks - peer.tokens // blocks.block_tokens
            self._caches.correct(Cache(peer.record.process, peer.rank), blocks.keys[first : peer.num_blocks])

    def accepted(self, timings: Iterable[timing_pb2.StageTiming]) -> None:
        if self._link is None:
            return
        self._reader = None
        for timing in timings:
            seconds = timing.duration.ToNanoseconds() / 1e9
            if timing.stage == timing_pb2.STAGE_HANDOFF_TRANSFER:
                self._link.add(timing.num_bytes, seconds)
            elif timing.stage == timing_pb2.STAGE_HANDOFF_WAIT:
                self._entry.add(0.0, seconds)

    def close(self) -> None:
        if self._ticket is not None and not self._has_first_token:
            self._work.queue.give_up(self._ticket)
        self._ticket = None
        self._arrive()
        if self._reader is not None:
            # The answer ended with the first token, or failed before: the KV has not moved.
            self._caches.correct(self._reader, self._request.blocks.keys[self._matched.get(self._reader, 0) :])
            self._reader = None

    def _arrive(self) -> None:
        """From now on the decode worker's own load counts the request."""
        if self._coming_to is not None:
            self._coming_to.coming -= 1
            self._coming_to = None

    def _correct(self, cached_tokens: int) -> None:
        """Believes the worker if it found less in its cache than was predicted."""
        blocks = self._request.blocks
        found, believed = cached_tokens // blocks.block_tokens, self._prediction.cached_tokens // blocks.block_tokens
        self._caches.found(self._cost.process, found, believed)
        if found < believed:
            self._caches.correct(self._work.cache, blocks.keys[found:believed])
            # They are there now: the worker has just computed them.
            self._caches.expect(self._work.cache, blocks.keys[found:believed], 0.0)

    def _expect(self, worker: W, cache: Cache, seconds: float) -> None:
        """Counts the prompt's blocks as cached there from now on, and computed within so many seconds."""
        keys, have = self._request.blocks.keys, self._matched.get(cache, 0)
        if self._caches.reports(cache.process):
            self._caches.expect(cache, keys, seconds, start=have)
            return
        if have:
            self._caches.renew(cache, keys, have)
        room = worker.load.blocks_total // max(1, worker.record.data_parallel_ranks)
        self._caches.expect(cache, keys, seconds, room, start=have)
