"""A request on its workers: placed, prefilled, handed over, decoded, and moved elsewhere when a worker fails it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2, prompt_pb2
from baton.inference.v1 import generate_pb2, sampling_pb2, timing_pb2

from router import metrics, traces
from router.account import Account
from router.admission import Job
from router.answer import Answer, End
from router.fault_plan import strike
from router.hops import DecodeCall, Hops
from router.illustrated_prompt import IllustratedPrompt
from router.meter import Meter
from router.outbox import Outbox
from router.pace import DecodeTimer
from router.placement import Demand, Placement, Placer
from router.retry import Retries
from router.worker import Worker
from rpc.aio import timeout
from rpc.errors import (
    BatonError,
    Draining,
    EmbeddingLost,
    EngineFailed,
    HandoffLost,
    NoWorker,
    Overloaded,
    StaleEpoch,
    Unavailable,
)
from rpc.tracing.span import current_span

# The same request may succeed elsewhere. Never among them: what is wrong with the request itself.
_ELSEWHERE = (Unavailable, Overloaded, EngineFailed)
# What the worker was to read is gone, and the worker is not to blame: it may run the prompt itself.
_LEASE_GONE = (HandoffLost, EmbeddingLost, StaleEpoch)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A request that may run. Whoever made the prompt puts its embeddings away in the end."""

    model: str
    routing: generate_pb2.RoutingOptions
    prompt: IllustratedPrompt
    job: Job
    answer: Answer
    account: Account


@dataclass(frozen=True, slots=True)
class _Held:
    """KV that a prefill worker keeps for this request, until decode has confirmed that it took it over."""

    owner: Worker
    handoff: handoff_pb2.KvHandoff


@dataclass(frozen=True, slots=True)
class Track:
    """What all races have in common: who chooses the workers, who says whether to try again, and who measures."""

    placer: Placer
    retries: Retries
    meter: Meter


class Race:
    """One request on its workers: prefill, the baton, decode."""

    def __init__(self, entrant: Entrant, track: Track, hops: Hops, outbox: Outbox) -> None:
        self._model = entrant.model
        self._job = entrant.job
        self._answer = entrant.answer
        self._account = entrant.account
        self._ledger = entrant.account.ledger
        self._prompt = entrant.prompt
        tokens, layout = len(entrant.job.token_ids), entrant.prompt.embedding_layout
        self._demand = Demand(entrant.model, tokens, entrant.routing, layout)
        self._placer = track.placer
        self._retries = track.retries
        self._latencies = track.meter.latencies(entrant.account)
        self._hops = hops
        self._outbox = outbox
        self._held: _Held | None = None

    async def run(self) -> None:
        """From the choice of workers to the last message."""
        self._retries.earn()
        with self._ledger.measure(timing_pb2.STAGE_ROUTE) as span:
            await strike("route", self._account.request_id)
            placement = self._placer.place(self._demand)
            traces.route(placement, self._placer, self._demand, span)
        self._outbox.start(self._started(placement))
        try:
            end = await self._prefill_and_decode(placement)
        finally:
            await self._drop_baton()
        self._account.finish_reason = end.reason
        self._outbox.finish(self._answer.close(end), partial(self._finished, end))

    async def _prefill_and_decode(self, placement: Placement) -> End:
        placement = await self._prefill_somewhere(placement)
        if self._answer.end:
            return self._answer.end
        return await self._decode_somewhere(placement.decode)

    # Prefill: the prompt's KV cache and the first token. Without a prefill worker, decode runs the prompt.

    async def _prefill_somewhere(self, placement: Placement) -> Placement:
        """Prefills on the worker placed, or on others where it fails. Says where the request goes on."""
        tried: frozenset[str] = frozenset()
        attempts = 0
        while placement.prefill is not None:
            prompt = await self._prompt.computable(self._account)
            try:
                await self._prefill(placement.prefill, placement.decode, prompt)
                return placement
            except (*_ELSEWHERE, EmbeddingLost) as error:
                attempts += 1
                self._retries.allow_prefill(error, attempts)
                if isinstance(error, EmbeddingLost):
                    self._prompt.lose()
                    continue
                tried |= {placement.prefill.record.process}
                placement = replace(placement, prefill=self._prefill_instead(placement, error, tried))
                self._migrated("prefill")
        return placement

    async def _prefill(self, worker: Worker, reader: Worker, prompt: prompt_pb2.Prompt) -> None:
        response = await self._hops.prefill(
            worker,
            prefill_pb2.PrefillRequest(
                request_id=self._account.request_id,
                model=self._model,
                prompt=prompt,
                sampling=self._job.sampling,
                reader=reader.record.certificate,
            ),
        )
        self._prompt.put_away()
        handoff = response.handoff
        if handoff.handoff_id:
            self._held = _Held(worker, handoff)
        self._account.prefilled_on(worker.record.worker_id, handoff.usage.cached_tokens)
        await self._take_first(handoff.first_token)

    async def _take_first(self, first: handoff_pb2.FirstToken) -> None:
        await self._take([first.token_id], [first.logprob] if first.HasField("logprob") else [])
        if self._answer.end is None and first.finish_reason:
            self._answer.end = self._answer.ended_by(first.finish_reason)

    def _prefill_instead(self, placement: Placement, error: BatonError, tried: frozenset[str]) -> Worker | None:
        try:
            worker = self._placer.prefill_instead(placement, self._demand, tried)
        except NoWorker:
            raise error from None
        if worker is None and isinstance(error, Overloaded):
            # Prompts that prefill has no room for must not crowd decode out.
            raise error
        return worker

    # Decode: from the baton, or, where there is none, from the ids so far.

    async def _decode_somewhere(self, worker: Worker) -> End:
        """Decodes on the worker placed, and goes on elsewhere where it fails: no token is lost or repeated."""
        tried: frozenset[str] = frozenset()
        attempts = 0
        while True:
            prompt = self._prompt.bare if self._held else await self._prompt.computable(self._account)
            try:
                return await self._decode(worker, prompt)
            except (*_ELSEWHERE, *_LEASE_GONE) as error:
                if self._answer.end:
                    # All that was asked for is here; only the worker's last message is missing.
                    return self._answer.end
                # A drain is planned, and no failure.
                attempts += not isinstance(error, Draining)
                self._retries.allow_decode(error, attempts)
                if isinstance(error, EmbeddingLost):
                    self._prompt.lose()
                if isinstance(error, _ELSEWHERE):
                    tried |= {worker.record.process}
                await self._drop_baton()
                worker = await self._decode_instead(error, tried)
                self._migrated("decode")

    async def _decode(self, worker: Worker, prompt: prompt_pb2.Prompt) -> End:
        handoff = self._held.handoff if self._held else None
        request = decode_pb2.DecodeRequest(
            request_id=self._account.request_id,
            model=self._model,
            prompt=prompt,
            handoff=handoff,
            emitted=self._answer.token_ids,
            sampling=self._job.sampling,
        )
        self._account.decoding_on(worker.record.worker_id, has_handoff=handoff is not None)
        timer = DecodeTimer(worker.pace, 0 if handoff else len(prompt.token_ids), len(request.emitted))
        async with self._hops.decode(worker, request) as calling:
            try:
                return await self._follow(calling, timer)
            finally:
                timer.end()
                current_span().set({"baton.completion_tokens": len(self._answer.token_ids) - len(request.emitted)})

    async def _follow(self, calling: DecodeCall, timer: DecodeTimer) -> End:
        """Reads a decode to its end: the worker's, or a stop string's, which the worker cannot see."""
        end: End | None = None
        async for response in calling.responses:
            match response.WhichOneof("event"):
                case "tokens":
                    timer.got_tokens(len(response.tokens.token_ids))
                    self._prompt.put_away()
                    await self._take(response.tokens.token_ids, response.tokens.logprobs)
                    timer.waits_for_more()
                    if self._answer.end and self._answer.end.stop_string:
                        return self._answer.end
                case "accepted":
                    timer.accepted()
                    self._held = None
                    calling.attempt.report(response.accepted.timings)
                case "finished":
                    timer.finished(response.finished.timings, len(self._answer.token_ids))
                    calling.attempt.report(response.finished.timings)
                    self._account.decoded(response.finished.usage.cached_tokens)
                    # Read on, to the status: a call that is left before that is a cancelled one to the worker.
                    end = self._answer.end = self._answer.end or self._answer.ended_by(response.finished.reason)
                    calling.attempt.is_complete = True
        if end is None:
            raise Unavailable("the decode stream ended before its last message")
        return end

    async def _decode_instead(self, error: BatonError, tried: frozenset[str]) -> Worker:
        if self._demand.routing.topology == generate_pb2.TOPOLOGY_DISAGGREGATED:
            # To go on, a decode worker would have to run the prompt.
            raise NoWorker(f"the request was to run disaggregated, and cannot be continued: {error.message}") from error
        context_tokens = self._demand.prompt_tokens + len(self._answer.token_ids) + 1
        try:
            # A worker that comes back is worth waiting for: the client has tokens already.
            async with timeout(self._retries.wait_seconds):
                return await self._placer.await_decode(self._demand, context_tokens, tried)
        except TimeoutError:
            raise error from None

    # On the way.

    async def _take(self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprob]) -> None:
        started = time.perf_counter()
        if not self._answer.token_ids:
            await strike("detokenize", self._account.request_id)
        piece = self._answer.push(token_ids, logprobs)
        self._latencies.saw(self._ledger.detokenized(started), len(token_ids))
        await self._outbox.put(piece)

    def _migrated(self, stage: str) -> None:
        self._account.migrations += 1
        metrics.MIGRATIONS.labels(stage).inc()

    async def _drop_baton(self) -> None:
        """Gives blocks back that no decode has taken over."""
        held, self._held = self._held, None
        if held:
            await self._hops.release(held.owner, held.handoff)

    def _started(self, placement: Placement) -> generate_pb2.Started:
        return generate_pb2.Started(
            model=self._model,
            prompt_tokens=self._demand.prompt_tokens,
            topology=placement.topology,
            prefill_worker_id=placement.prefill.record.worker_id if placement.prefill else "",
            decode_worker_id=placement.decode.record.worker_id,
            encoding=self._account.encoding,
            encode_worker_ids=self._account.encode_worker_ids,
        )

    def _finished(self, end: End) -> generate_pb2.Finished:
        return generate_pb2.Finished(
            reason=end.reason,
            stop_string=end.stop_string,
            stop_token_id=end.stop_token_id,
            usage=self._account.usage(),
            ledger=self._ledger.message().stages,
            migrations=self._account.migrations,
            topology=self._account.topology,
            prefill_worker_id=self._account.prefill_worker_id,
            decode_worker_id=self._account.decode_worker_id,
        )
