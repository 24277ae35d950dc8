"""A request on its workers: prefill, handoff, decode. Continues on another worker when one fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.engine.v1 import decode_pb2, handoff_pb2, prompt_pb2
from baton.errors import (
    BatonError,
    EmbeddingLost,
    HandoffLost,
    InvalidReply,
    LayoutMismatch,
    NoWorker,
    Overloaded,
    StaleEpoch,
    Unavailable,
)
from baton.inference.v1 import generate_pb2, sampling_pb2, timing_pb2
from discovery.record import KEEPS_STREAMS
from router.context import RequestContext
from router.moving.decodes import ReadDecode, ReadDecodes
from router.moving.yielded import Yielded
from router.multimodal.prompt import MultimodalPrompt
from router.placement.placer import Placer
from router.resume.record import resumption, stream_keep
from router.routing.latency import DecodeTimer
from router.routing.policy import IgnoredProgress, Placement, Progress, RoutingRequest, needed_capabilities
from router.routing.retry import Attempts, Retries
from router.stream.meter import TokenMeter
from router.stream.writer import StreamWriter
from router.telemetry import metrics
from router.telemetry.request_metrics import RequestMetrics
from router.text.completion import Completion, Finish
from router.workers.calls import RETRYABLE, DecodeCall, WorkerCalls
from router.workers.destinations import Destination, DestinationLost, allocates_first
from router.workers.handle import Waiting, WorkerHandle
from router.workers.loras import named
from router.workers.prefetches import Prefetch
from router.workers.replies import Suspects, check_handoff, check_yielded, reported_logprobs
from router.workers.spans import set_routing_attributes
from rpc.tracing.span import current_span
from runtime.aio import timeout
from runtime.clock import perf_counter

# The KV or embedding that the worker was to read is gone, or does not fit. The worker is not to blame, and may run the
# prompt itself.
_LEASE_LOST = (HandoffLost, EmbeddingLost, StaleEpoch, LayoutMismatch)

# How many tokens' KV a worker reads, even slowly, while it would compute one.
_MOVED_PER_COMPUTED = 10

_Placement = Placement[WorkerHandle]


@dataclass(frozen=True, slots=True)
class _HeldHandoff:
    """KV that a prefill worker holds until the decode worker confirms that it has taken it over."""

    owner: WorkerHandle
    handoff: handoff_pb2.KvHandoff


class Executor:
    """Runs requests on workers that `placer` chooses. Those in `decodes` can be moved."""

    def __init__(self, placer: Placer, retries: Retries, metrics: RequestMetrics, decodes: ReadDecodes) -> None:
        self.decodes = decodes
        self.placer = placer
        self.retries = retries
        self.metrics = metrics

    async def run(
        self, ctx: RequestContext, prompt: MultimodalPrompt, completion: Completion, stream: StreamWriter
    ) -> None:
        """Runs one request to its end, and writes its messages to `stream`. The caller releases `prompt`."""
        await RequestExecution(self, ctx, prompt, completion, stream).run()


class RequestExecution(Waiting):
    """One request on its workers."""

    def __init__(
        self,
        executor: Executor,
        ctx: RequestContext,
        prompt: MultimodalPrompt,
        completion: Completion,
        stream: StreamWriter,
    ) -> None:
        self._placer = executor.placer
        self._decodes = executor.decodes
        self._yielded: Yielded | None = None  # by the last decode, until the next one has given a token
        self._retries = executor.retries
        self._meter = TokenMeter(ctx.stats, ctx.timings, executor.metrics.latencies(ctx.stats), completion.token_ids)
        self._stats = ctx.stats
        self._ctx = ctx
        self._prompt = prompt
        self._completion = completion
        self._stream = stream
        self._routing_request = RoutingRequest(
            prompt.model,
            prompt.without_embeddings,
            ctx.request.routing,
            prompt.embedding_layout,
            answer_tokens=completion.sampling.stop.max_tokens,
            token_ids=prompt.token_ids,
            needs=needed_capabilities(ctx.request),
        )
        if ctx.notes is not None:
            ctx.notes.runs(self._routing_request, completion)
        self._progress: Progress = IgnoredProgress()
        self._suspects: Suspects | None = None  # once a worker has given a reply that it may not give
        self._attempts: Attempts | None = None  # at the present stage
        self._calls = WorkerCalls(ctx, prompt.model, completion.sampling)
        self._has_started = False
        self._known: generate_pb2.Started | None = None  # of a kept answer: what its client was told
        self._has_moved = False  # a decode that knew what was cached of the prompt has yielded
        self._held: _HeldHandoff | None = None
        # Of engines that allocate first: until their decode has accepted it.
        self._destination: Destination | None = None
        # Of long prompts: until their decode has taken over what is read while they are computed.
        self._prefetch: Prefetch | None = None

    async def run(self) -> None:
        """Places the request, then prefill → handoff → decode."""
        placement = await self._place()
        try:
            # A prefill worker runs the prompt, samples the first token and holds the KV: the handoff.
            placement = await self._prefill_with_retries(placement)
            if not self._completion.finished:
                # A decode worker takes the handoff over, or runs the prompt itself, and generates the other tokens.
                await self._decode_with_retries(placement)
        finally:
            self._progress.close()
            await self._release_handoff()
        self._finish()

    async def _place(self) -> _Placement:
        self._retries.earn()
        with self._ctx.timings.measure(timing_pb2.STAGE_ROUTE) as span:
            await self._ctx.inject("route")
            self._routing_request = await self._placer.with_blocks(self._routing_request)
            placement = self._follow(self._placer.place(self._routing_request))
            metrics.PLACED[placement.cache_view].inc()
            set_routing_attributes(placement, span)
        return placement

    def _start(self, placement: _Placement) -> None:
        """Sends the first message, unless it was sent."""
        if not self._has_started:
            self._has_started = True
            self._stream.start(self._started(placement))

    def _follow(self, placement: _Placement) -> _Placement:
        """Reports to the policy what happens to the request, from now on under this placement."""
        self._progress.close()
        self._progress = placement.progress
        if self._ctx.notes is not None:
            self._ctx.notes.placed(placement)
        return placement

    def _finish(self) -> None:
        finish = self._completion.finished
        assert finish is not None
        self._ctx.stats.finish_reason = finish.reason
        self._stream.put_now(self._completion.flush())
        self._stream.finish("", partial(self._fill_finished, finish))

    # Prefill: the prompt's KV cache and the first token. Without a prefill worker the decode worker runs the prompt.

    async def _prefill_with_retries(self, placement: _Placement) -> _Placement:
        """Prefills on the chosen worker, or on others if it fails. Returns the placement to decode with."""
        attempts = self._attempts = self._retries.attempts("prefill")
        while placement.prefill is not None:
            prompt = await self._prompt.with_embeddings()
            try:
                await self._prefill(placement.prefill, placement, prompt)
                return placement
            except DestinationLost as lost:
                # Without it the prompt is run by whichever decode worker takes the request.
                return await self._continue_elsewhere(placement, lost.error, attempts)
            except (*RETRYABLE, EmbeddingLost) as error:
                self._progress.close()
                self._suspect(placement.prefill, "prefill", error)
                attempts.allow(error)
                await self._release_handoff()
                if isinstance(error, EmbeddingLost):
                    self._prompt.invalidate()
                    continue
                attempts.exclude(placement.prefill.record.process)
                if self._placer.can_prefill(placement, self._routing_request, attempts.tried):
                    await attempts.pause(error, self._ctx.deadline.remaining_seconds)
                placement = self._follow(self._another_prefill(placement, error, attempts.tried))
                self._count_migration("prefill")
        return placement

    async def _prefill(self, worker: WorkerHandle, placement: _Placement, prompt: prompt_pb2.Prompt) -> None:
        tokens = len(prompt.token_ids)
        if allocates_first(placement):
            self._start(placement)
            self._await_answer(0)
            self._destination = await self._calls.allocate(placement, self._prompt.without_embeddings, self)
            self._await_answer(tokens)
            running = self._calls.prefill(worker, prompt, placement, self, self._destination)
            handoff = await self._destination.during(running)
        else:
            if self._placer.hands_over_early(placement, self._routing_request):
                reading = partial(self._calls.prefetch, placement, self._prompt.without_embeddings)
                self._prefetch = Prefetch(reading, self._ctx.call_id)
            self._await_answer(tokens)
            # The first message is made and sent while the worker has the prompt already.
            handoff = await self._calls.prefill(worker, prompt, placement, self, sent=partial(self._start, placement))
        if handoff.handoff_id:
            self._held = _HeldHandoff(worker, handoff)
        check_handoff(handoff, worker.record, tokens)
        self._prompt.release()
        first, cached_tokens = handoff.first_token, handoff.usage.cached_tokens
        if cached_tokens > tokens:
            cached_tokens = tokens
        self._progress.first_token(cached_tokens)
        reported = self._reported(first.prompt_logprobs) if first.HasField("prompt_logprobs") else None
        await self._add_tokens([first.token_id], [first.logprob] if first.HasField("logprob") else [], reported)
        self._stats.prefilled_on(worker.record.worker_id, cached_tokens)
        self._stats.found_in_caches(handoff.usage)
        if self._suspects is not None:
            self._suspects.answered(worker)
        if first.finish_reason:
            self._completion.finish(first.finish_reason)
        if not self._completion.finished:
            # It is written before the decode call is made, which has all ids of the prompt again: now, or, where
            # another one of the connection was written in this turn of the loop, in the next one.
            self._stream.lane.flush()
            await asyncio.sleep(0)

    def _another_prefill(self, placement: _Placement, error: BatonError, tried: frozenset[str]) -> _Placement:
        try:
            found = self._placer.replace_prefill(placement, self._routing_request, tried)
        except NoWorker:
            raise error from None
        if found.prefill is None and isinstance(error, Overloaded):
            # Prompts that the prefill workers have no room for must not displace decoding.
            found.progress.close()
            raise error
        return found

    # Decode: from the handoff, or from the prompt and the ids so far.

    async def _decode_with_retries(self, placement: _Placement) -> None:
        """Decodes on the chosen worker, and continues on others if it fails. No token is lost or repeated."""
        self._start(placement)
        attempts = self._attempts = self._retries.attempts("decode")
        while True:
            prompt = await self._decode_prompt()
            try:
                yielded = await self._decode(placement, prompt)
                if yielded is None or self._completion.finished:
                    return None
                attempts = self._attempts = self._retries.attempts("decode")
                placement = await self._move_on(yielded)
            except (*RETRYABLE, *_LEASE_LOST) as error:
                if self._completion.finished:
                    # Only the worker's last message is missing, or more came than was asked for.
                    return self._suspect(placement.decode, "decode", error)
                placement = await self._continue_elsewhere(placement, error, attempts)

    async def _decode_prompt(self) -> prompt_pb2.Prompt:
        """The prompt for a decode, with embeddings where it is computed."""
        return self._prompt.without_embeddings if self._held else await self._prompt.with_embeddings()

    async def _continue_elsewhere(self, placement: _Placement, error: BatonError, attempts: Attempts) -> _Placement:
        """The placement, without prefill, of a request that its decode worker has failed."""
        self._progress.close()
        self._suspect(placement.decode, "decode", error)
        if self._held and self._yielded:
            is_lost = isinstance(error, _LEASE_LOST)
            if (found := self._yielded.next_reader(placement.decode, is_lost=is_lost)) is not None:
                return self._follow(Placement(found))
        attempts.allow(error, has_tokens=bool(self._completion.token_ids))
        if isinstance(error, EmbeddingLost):
            self._prompt.invalidate()
        if isinstance(error, RETRYABLE) or (isinstance(error, LayoutMismatch) and not self._held):
            attempts.exclude(placement.decode.record.process)
        await self._release_handoff()
        if self._placer.can_decode(self._routing_request, self._context_tokens, attempts.tried):
            await attempts.pause(error, self._ctx.deadline.remaining_seconds)
        placement = self._follow(await self._another_decode(error, attempts.tried))
        self._count_migration("decode")
        return placement

    async def _move_on(self, yielded: Yielded) -> _Placement:
        """The placement of a decode that has yielded: with its KV, or, if it had none, from its ids."""
        self._progress.close()
        found = yielded.reader() or (self._held.owner if self._held else None)
        if found is None:
            unmoved = Unavailable("the decode has yielded without KV, and no other worker can take it over")
            return self._follow(await self._another_decode(unmoved, frozenset()))
        return self._follow(Placement(found))

    async def _decode(self, placement: _Placement, prompt: prompt_pb2.Prompt) -> Yielded | None:
        """Decodes to the end, or until the decode has yielded, to go on elsewhere."""
        worker = placement.decode
        handoff = self._held.handoff if self._held else None
        emitted = len(self._completion.token_ids)
        if self._yielded is not None:
            self._yielded.has_kv = handoff is not None
        self._ctx.stats.decoding_on(worker.record.worker_id, has_handoff=handoff is not None)
        tokens = len(prompt.token_ids)
        timer = DecodeTimer(worker.latency, 0 if handoff else tokens, emitted)
        self._await_answer(tokens // _MOVED_PER_COMPUTED if handoff else tokens)
        read = partial(self._read_call, timer, emitted, worker)
        destination = self._destination if handoff else None
        if self._ctx.keep is not None:
            self._calls.keep_next(self._kept_by(worker))
        await self._calls.decode(placement, prompt, handoff, self._completion.token_ids, read, self, destination)
        if self._ctx.keep is not None:
            await self._settle(worker)
        return self._yielded

    # Kept answers: see router/resume.

    def _kept_by(self, worker: WorkerHandle) -> decode_pb2.StreamKeep | None:
        known = self._known
        if known is None or not known.HasField("resumption") or KEEPS_STREAMS not in worker.record.capabilities:
            return None
        return stream_keep(self._ctx, known)

    async def _settle(self, worker: WorkerHandle) -> None:
        """Ends the generation of an answer that has ended here alone: leaving the call does not."""
        if self._ends_here and self._known is not None and self._known.HasField("resumption"):
            await self._calls.settle(worker)

    # How long the request waits for its workers' answers: see Waiting.

    def _await_answer(self, tokens: int) -> None:
        self.awaits_answer, self.asked_at, self.tokens = True, None, tokens

    def answer_seconds(self) -> float:
        return self._retries.answer_seconds(self._ctx.deadline.remaining_seconds)

    def another_can(self, worker: WorkerHandle) -> bool:
        """True if the call can be given up: another worker could answer, or the answer is complete without its end."""
        if self._completion.finished is not None:
            return True
        if self._held and self._yielded:
            return worker is not self._held.owner
        attempts = self._attempts
        if attempts is None or not attempts.has_another or _is_disaggregated(self._routing_request):
            return False
        tried = attempts.tried | {worker.record.process}
        return self._placer.can_decode(self._routing_request, self._context_tokens, tried)

    def _await_end(self) -> None:
        self._await_answer(0)

    def _suspect(self, worker: WorkerHandle, stage: str, error: BatonError) -> None:
        self._suspects = self._suspects or Suspects()
        self._suspects.add(worker, stage, error)

    async def _read_call(self, timer: DecodeTimer, emitted: int, worker: WorkerHandle, call: DecodeCall) -> None:
        self._meter.begin_call(timer)
        self._stream.lane.attach(self._completion, self._meter, partial(self._answer_ended, call))
        decode = ReadDecode(
            worker, self._ctx, self._routing_request, self._prompt.without_embeddings, self._completion, self._calls
        )
        try:
            with self._decodes.reading(decode):
                await self._read_stream(call, timer, decode)
        finally:
            self._stream.lane.detach()
            self._meter.end_call()
            current_span().set({"baton.completion_tokens": len(self._completion.token_ids) - emitted})

    async def _read_stream(self, call: DecodeCall, timer: DecodeTimer, decode: ReadDecode) -> None:
        """Reads a decode stream to its end, or to a stop string, which the worker does not see.

        The tokens after the first ones are pushed into the lane, unless something is looked for in their text.
        """
        has_ended = False
        async for response in call.responses:
            if has_ended:
                raise InvalidReply("the decode stream goes on after its last message")
            match response.WhichOneof("event"):
                case "tokens":
                    await self._read_tokens(response.tokens, decode.worker)
                    if self._suspects is not None:
                        self._suspects.answered(decode.worker)
                    if self._completion.finished is not None:
                        if self._ends_here:
                            return
                        self._await_end()
                    if self._completion.takes_single_tokens:
                        call.responses.set_sink(self._stream.lane)
                case "accepted":
                    timer.accepted()
                    self._progress.accepted(response.accepted.timings)
                    self._held = self._destination = None
                    call.timing.report(response.accepted.timings)
                case "finished":
                    timer.finished(response.finished.timings, len(self._completion.token_ids))
                    call.timing.report(response.finished.timings)
                    if not self._completion.token_ids:
                        raise InvalidReply("the decode stream ended without a token")
                    self._found_cached(response.finished.usage)
                    if response.finished.drafted_tokens:
                        self._stats.speculated(response.finished.drafted_tokens, response.finished.accepted_tokens)
                    self._completion.finish(response.finished.reason)
                    call.timing.is_complete = True
                    if not self.awaits_answer:
                        self._await_end()
                    # Read on to the status: leaving now would cancel the call on the worker.
                    has_ended = True
                    call.responses.set_sink(None)
                case "yielded":
                    self._end_of_yielded(decode, response.yielded)
                    call.timing.report(response.yielded.timings)
                    has_ended = call.timing.is_complete = True
                    call.responses.set_sink(None)
        if not has_ended and not self._ends_here:
            raise Unavailable("the decode stream ended before its last message")

    def _found_cached(self, usage: handoff_pb2.PromptUsage) -> None:
        """Notes what a decode worker had in its caches; a later one has the KV that another computed there."""
        cached_tokens = min(usage.cached_tokens, self._stats.prompt_tokens)
        if not self._has_moved:
            self._stats.decoded(cached_tokens)
            if not self._stats.prefill_worker_id:
                self._stats.found_in_caches(usage)
        self._progress.found_cached(cached_tokens)

    def _end_of_yielded(self, decode: ReadDecode, end: decode_pb2.DecodeYielded) -> None:
        """Takes over the KV of a decode that goes on elsewhere. Raises InvalidReply."""
        record, ids = decode.worker.record, self._completion.token_ids
        # Of a kept decode another router may have asked.
        if self._yielded is not None and decode.target is None and decode.calls.reader <= 1:
            raise InvalidReply("the decode yields again without a token, and was not asked to")
        if end.HasField("handoff"):
            if not ids:
                raise InvalidReply("the decode yields KV before its first token")
            check_yielded(end.handoff, record, decode.num_tokens, ids[-1])
            self._held = _HeldHandoff(decode.worker, end.handoff)
            self._found_cached(end.usage)
            self._has_moved = True
        self._yielded = Yielded(decode, self._placer)
        if self._ctx.notes is not None:
            self._ctx.notes.yielded(end.handoff if end.HasField("handoff") else None)
        if end.drafted_tokens:
            self._stats.speculated(end.drafted_tokens, end.accepted_tokens)
        if not self.awaits_answer:
            self._await_end()

    @property
    def _ends_here(self) -> bool:
        return self._completion.finished is not None and self._completion.finished.is_unknown_to_worker

    def _answer_ended(self, call: DecodeCall) -> None:
        """A token that was pushed has finished the answer: the worker ends the call, if it knows of this end."""
        if self._ends_here:
            call.responses.stop()
        else:
            self._await_end()

    async def _read_tokens(self, tokens: decode_pb2.DecodedTokens, worker: WorkerHandle) -> None:
        count = len(tokens.token_ids)
        if count:
            # Before the client is waited for, which is not the worker's time.
            self.awaits_answer = False
            if self._yielded is not None:
                self._stats.moves += self._yielded.went_on(worker)
                self._yielded = None
        self._meter.arrived(count)
        self._progress.first_token(None)
        self._prompt.release()
        reported = self._reported(tokens.prompt_logprobs) if tokens.HasField("prompt_logprobs") else None
        await self._add_tokens(tokens.token_ids, tokens.logprobs, reported)
        self._meter.passed_on()
        if self._completion.has_overrun:
            raise InvalidReply("tokens came after the end of the answer")

    def _reported(self, prompt_logprobs: generate_pb2.PromptLogprobs) -> generate_pb2.PromptLogprobs | None:
        return reported_logprobs(prompt_logprobs, self._completion.sampling, self._prompt.without_embeddings)

    async def _another_decode(self, error: BatonError, tried: frozenset[str]) -> _Placement:
        if _is_disaggregated(self._routing_request):
            # To continue, a decode worker would have to run the prompt.
            raise NoWorker(f"a disaggregated request cannot continue without its handoff: {error.message}") from error
        try:
            # Waiting is worth it: the client has tokens already.
            async with timeout(self._retries.wait_seconds):
                return await self._placer.await_decode(self._routing_request, self._context_tokens, tried)
        except TimeoutError:
            if isinstance(error, _LEASE_LOST):
                # Another worker would have run the prompt, were there one: that is what ends the request.
                raise NoWorker(f"no decode worker became ready to continue: {error.message}") from error
            raise error from None

    @property
    def _context_tokens(self) -> int:
        """The context length that a worker needs to continue the request."""
        return self._routing_request.prompt_tokens + len(self._completion.token_ids) + 1

    async def _release_handoff(self) -> None:
        """Frees the KV that no decode worker has taken over, and what was allocated or read for it."""
        held, self._held = self._held, None
        destination, self._destination = self._destination, None
        prefetch, self._prefetch = self._prefetch, None
        if prefetch:
            await prefetch.end()
        if held:
            await self._calls.release(held.owner, held.handoff)
        if destination:
            await self._calls.release_destination(destination)

    async def _add_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.TokenLogprob],
        prompt_logprobs: generate_pb2.PromptLogprobs | None = None,
    ) -> None:
        started = perf_counter()
        if not self._completion.token_ids:
            await self._ctx.inject("detokenize")
        delta = self._completion.push(token_ids, logprobs)
        self._meter.detokenized(started, len(token_ids))
        await self._stream.put(replace(delta, prompt_logprobs=prompt_logprobs) if prompt_logprobs else delta)

    def _count_migration(self, stage: str) -> None:
        self._ctx.stats.migrations += 1
        metrics.MIGRATIONS.labels(stage).inc()

    def _started(self, placement: _Placement) -> generate_pb2.Started:
        stats = self._ctx.stats
        started = generate_pb2.Started(
            model=named(self._prompt.model, self._routing_request.lora),
            prompt_tokens=self._routing_request.prompt_tokens,
            topology=placement.topology,
            prefill_worker_id=placement.prefill.record.worker_id if placement.prefill else "",
            decode_worker_id=placement.decode.record.worker_id,
            encoding=stats.encoding,
            encode_worker_ids=stats.encode_worker_ids,
            cache_view=placement.cache_view,
        )
        if self._ctx.keep is not None:
            seed = self._completion.sampling.params.seed
            given = resumption(self._ctx, placement.decode.record, seed)
            if given is not None:
                started.resumption.CopyFrom(given)
            self._known = started
        return started

    def _fill_finished(self, finish: Finish, finished: generate_pb2.Finished) -> None:
        self._ctx.stats.fill(finished)
        if finish.stop_string:
            finished.stop_string = finish.stop_string
        if finish.stop_token_id is not None:
            finished.stop_token_id = finish.stop_token_id


def _is_disaggregated(request: RoutingRequest) -> bool:
    return request.routing.topology == generate_pb2.TOPOLOGY_DISAGGREGATED
