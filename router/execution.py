"""A request on its workers: prefill, handoff, decode. Continues on another worker when one fails."""

import asyncio
from collections.abc import Coroutine
from functools import cached_property, partial
from typing import Any

from baton.engine.v1 import decode_pb2, prompt_pb2
from baton.errors import BatonError, EmbeddingLost, TokensLost
from baton.inference.v1 import generate_pb2, timing_pb2
from discovery.record import KEEPS_STREAMS
from router.context import RequestContext
from router.decoding.failover import LEASE_LOST, Failover
from router.decoding.reading import DecodeReading
from router.decoding.state import ExecutionState, Executor, HeldHandoff
from router.moving.decodes import Yielded
from router.multimodal.prompt import MultimodalPrompt
from router.resume.reattaching import reattach
from router.resume.record import resumption, stream_keep
from router.routing.latency import DecodeTimer
from router.routing.policy import Placement
from router.stream.writer import StreamWriter
from router.telemetry import metrics
from router.text.completion import Completion, Finish
from router.workers.calls import RETRYABLE
from router.workers.decode_calls import AdoptedDecode, DecodeCall
from router.workers.destinations import DestinationLost, Prefetch, allocates_first, report_loan
from router.workers.handle import WorkerHandle
from router.workers.loras import named
from router.workers.replies import check_handoff
from router.workers.spans import set_routing_attributes

# How many tokens' KV a worker reads, even slowly, while it would compute one.
_MOVED_PER_COMPUTED = 10

_Placement = Placement[WorkerHandle]


class RequestExecution:
    """One request on its workers."""

    def __init__(
        self,
        executor: Executor,
        ctx: RequestContext,
        prompt: MultimodalPrompt,
        completion: Completion,
        stream: StreamWriter,
    ) -> None:
        self._state = ExecutionState(executor, ctx, prompt, completion, stream)
        self._reading = DecodeReading(self._state)
        self._has_started = False
        self._known: generate_pb2.Started | None = None  # of a kept answer: what its client was told
        self._adopted: AdoptedDecode | None = None  # a decode that runs already, until it is read on

    @cached_property
    def _failover(self) -> Failover:
        return Failover(self._state)

    async def run(self) -> None:
        """Places the request, then prefill → handoff → decode."""
        placement = await self._place()
        try:
            # A prefill worker runs the prompt, samples the first token and holds the KV: the handoff.
            placement = await self._prefill_with_retries(placement)
            if not self._state.completion.finished:
                # A decode worker takes the handoff over, or runs the prompt itself, and generates the other tokens.
                await self._decode_with_retries(placement)
        finally:
            self._state.progress.close()
            await self._state.release_handoff()
        self._finish()

    async def _place(self) -> _Placement:
        state = self._state
        state.retries.earn()
        with state.ctx.stats.timings.measure(timing_pb2.STAGE_ROUTE) as span:
            await state.ctx.inject("route")
            state.routing_request = await state.placer.with_blocks(state.routing_request)
            placement = state.follow(state.placer.place(state.routing_request))
            metrics.PLACED[placement.cache_view].inc()
            set_routing_attributes(placement, span)
        return placement

    def _start(self, placement: _Placement) -> None:
        """Sends the first message, unless it was sent."""
        if not self._has_started:
            self._has_started = True
            self._state.stream.start(self._started(placement))

    def _finish(self) -> None:
        state = self._state
        finish = state.completion.finished
        assert finish is not None
        state.ctx.stats.finish_reason = finish.reason
        state.stream.finish(state.completion.flush(), partial(self._fill_finished, finish))

    # Prefill: the prompt's KV cache and the first token. Without a prefill worker the decode worker runs the prompt.

    async def _prefill_with_retries(self, placement: _Placement) -> _Placement:
        """Prefills on the chosen worker, or on others if it fails. Returns the placement to decode with."""
        state = self._state
        attempts = state.attempts = state.retries.attempts("prefill")
        while placement.prefill is not None:
            prompt = await state.prompt.with_embeddings()
            try:
                await self._prefill(placement.prefill, placement, prompt)
                return placement
            except DestinationLost as lost:
                # Without it the prompt is run by whichever decode worker takes the request.
                return await self._failover.continue_elsewhere(placement, lost.error, attempts)
            except (*RETRYABLE, EmbeddingLost) as error:
                state.progress.close()
                state.suspect(placement.prefill, "prefill", error)
                attempts.allow(error)
                await state.release_handoff()
                if isinstance(error, EmbeddingLost):
                    state.prompt.invalidate()
                    continue
                attempts.exclude(placement.prefill.record.process)
                if state.placer.can_prefill(placement, state.routing_request, attempts.tried):
                    await attempts.pause(error, state.ctx.deadline.remaining_seconds)
                placement = state.follow(self._failover.another_prefill(placement, error, attempts.tried))
                self._failover.count_migration("prefill")
        return placement

    async def _prefill(self, worker: WorkerHandle, placement: _Placement, prompt: prompt_pb2.Prompt) -> None:
        state = self._state
        tokens = len(prompt.token_ids)
        if allocates_first(placement):
            self._start(placement)
            state.await_answer(0)
            state.destination = await state.calls.allocate(placement, state.prompt.without_embeddings, state)
            state.await_answer(tokens)
            running = state.calls.prefill(worker, prompt, placement, state, state.destination)
            handoff = await state.destination.during(running)
        else:
            if state.placer.hands_over_early(placement, state.routing_request):
                reading = partial(state.calls.prefetch, placement, state.prompt.without_embeddings)
                state.prefetch = Prefetch(reading, state.ctx.call_id)
            state.await_answer(tokens)
            # The first message is made and sent while the worker has the prompt already.
            handoff = await state.calls.prefill(worker, prompt, placement, state, sent=partial(self._start, placement))
        if handoff.handoff_id:
            state.held = HeldHandoff(worker, handoff)
        check_handoff(handoff, worker.record, tokens)
        state.prompt.release()
        first, cached_tokens = handoff.first_token, handoff.usage.cached_tokens
        if cached_tokens > tokens:
            cached_tokens = tokens
        report_loan(state.progress, handoff.usage)
        state.progress.first_token(cached_tokens)
        reported = self._reading.reported(first.prompt_logprobs) if first.HasField("prompt_logprobs") else None
        await self._reading.add_tokens([first.token_id], [first.logprob] if first.HasField("logprob") else [], reported)
        state.stats.prefilled_on(worker.record.worker_id, cached_tokens)
        state.stats.found_in_caches(handoff.usage)
        if state.suspects is not None:
            state.suspects.answered(worker)
        if first.finish_reason:
            state.completion.finish(first.finish_reason)
        if not state.completion.finished:
            # It is written before the decode call is made, which has all ids of the prompt again: now, or, where
            # another one of the connection was written in this turn of the loop, in the next one.
            state.stream.lane.flush()
            await asyncio.sleep(0)

    # Decode: from the handoff, or from the prompt and the ids so far.

    async def _decode_with_retries(self, placement: _Placement) -> None:
        """Decodes on the chosen worker, and continues on others if it fails. No token is lost or repeated."""
        state = self._state
        self._start(placement)
        attempts = state.attempts = state.retries.attempts("decode")
        while True:
            prompt = await self._decode_prompt()
            try:
                yielded = await self._decode(placement, prompt)
                if yielded is None or state.completion.finished:
                    return None
                attempts = state.attempts = state.retries.attempts("decode")
                placement = await self._failover.move_on(yielded)
            except (*RETRYABLE, *LEASE_LOST) as error:
                if state.has_gap:
                    state.suspect(placement.decode, "decode", error)
                    worker_id = placement.decode.record.worker_id
                    raise TokensLost(error.message, stage="decode", worker_id=worker_id) from error
                if state.completion.finished:
                    # Only the worker's last message is missing, or more came than was asked for.
                    return state.suspect(placement.decode, "decode", error)
                self._adopted = await self._reattach(placement.decode, error)
                if self._adopted is not None:
                    placement = state.follow(Placement(self._adopted.worker))
                else:
                    placement = await self._failover.continue_elsewhere(placement, error, attempts)

    async def _decode_prompt(self) -> prompt_pb2.Prompt:
        """The prompt for a decode, with embeddings where it is computed."""
        # A decode that runs, or whose KV is held, has them.
        runs = self._adopted is not None or self._state.held is not None
        return self._state.prompt.without_embeddings if runs else await self._state.prompt.with_embeddings()

    async def _decode(self, placement: _Placement, prompt: prompt_pb2.Prompt) -> Yielded | None:
        """Decodes to the end, or until the decode has yielded, to go on elsewhere."""
        state = self._state
        adopted, self._adopted = self._adopted, None
        if adopted is not None:
            return await self._go_on(adopted)
        worker = placement.decode
        handoff = state.held.handoff if state.held else None
        emitted = len(state.completion.token_ids)
        if state.yielded is not None:
            state.yielded.has_kv = handoff is not None
        state.ctx.stats.decoding_on(worker.record.worker_id, has_handoff=handoff is not None)
        tokens = len(prompt.token_ids)
        timer = DecodeTimer(worker.latency, 0 if handoff else tokens, emitted)
        state.await_answer(tokens // _MOVED_PER_COMPUTED if handoff else tokens)
        read = partial(self._reading.read, timer, emitted, worker)
        destination = state.destination if handoff else None
        if state.ctx.keep is not None:
            state.calls.keep_next(self._kept_by(worker))
        calls = state.calls
        try:
            await calls.decode(placement, prompt, handoff, state.completion.token_ids, read, state, destination)
        except asyncio.CancelledError:
            await state.leave_handoff(worker)
            raise
        if state.ctx.keep is not None:
            await self._settle(worker)
        return state.yielded

    # Kept answers: see router/resume.

    async def _reattach(self, lost: WorkerHandle, error: BatonError) -> AdoptedDecode | None:
        """The same decode on its worker, once that is ready again; None if it has not begun, or does not go on."""
        state = self._state
        if state.ctx.keep is None or self._kept_by(lost) is None or state.yielded or state.held:
            return None
        adopted = await reattach(state, lost, error)
        if adopted is not None:
            try:
                await state.release_handoff()
            except BaseException:
                # Nothing reads it any more: its worker keeps it for the next reader only once the call has ended.
                await adopted.responses.aclose()
                raise
        return adopted

    async def _go_on(self, adopted: AdoptedDecode) -> Yielded | None:
        """Reads a decode that runs already, for another router until now, or in another process of its worker."""
        state, worker = self._state, adopted.worker
        state.stats.decode_worker_id = worker.record.worker_id
        emitted = len(state.completion.token_ids)
        timer = DecodeTimer(worker.latency, 0, emitted)
        await state.calls.go_on(adopted, partial(self._read_on, timer, adopted), state)
        await self._settle(worker)
        return state.yielded

    async def _read_on(self, timer: DecodeTimer, adopted: AdoptedDecode, call: DecodeCall) -> None:
        state, emitted = self._state, len(self._state.completion.token_ids)
        if missing := adopted.attached.token_ids[emitted:]:
            await self._reading.add_tokens(missing, adopted.attached.logprobs)
        if state.completion.finished is not None:
            state.await_answer(0)
        if not state.ends_here:
            await self._reading.read(timer, emitted, adopted.worker, call)

    def _kept_by(self, worker: WorkerHandle) -> decode_pb2.StreamKeep | None:
        known = self._known
        if known is None or not known.HasField("resumption") or KEEPS_STREAMS not in worker.record.capabilities:
            return None
        return stream_keep(self._state.ctx, known)

    async def _settle(self, worker: WorkerHandle) -> None:
        """Ends the generation of an answer that has ended here alone: leaving the call does not."""
        if self._state.ends_here and self._known is not None and self._known.HasField("resumption"):
            await self._state.calls.settle(worker)

    def _started(self, placement: _Placement) -> generate_pb2.Started:
        state = self._state
        stats = state.ctx.stats
        started = generate_pb2.Started(
            model=named(state.prompt.model, state.routing_request.lora),
            prompt_tokens=state.routing_request.prompt_tokens,
            topology=placement.topology,
            prefill_worker_id=placement.prefill.record.worker_id if placement.prefill else "",
            decode_worker_id=placement.decode.record.worker_id,
            encoding=stats.encoding,
            encode_worker_ids=stats.encode_worker_ids,
            cache_view=placement.cache_view,
        )
        if state.ctx.keep is not None:
            seed = state.completion.sampling.params.seed
            given = resumption(state.ctx, placement.decode.record, seed)
            if given is not None:
                started.resumption.CopyFrom(given)
            self._known = started
        return started

    def _fill_finished(self, finish: Finish, finished: generate_pb2.Finished) -> None:
        self._state.ctx.stats.fill(finished)
        if finish.stop_string:
            finished.stop_string = finish.stop_string
        if finish.stop_token_id is not None:
            finished.stop_token_id = finish.stop_token_id


def execute(
    executor: Executor,
    ctx: RequestContext,
    prompt: MultimodalPrompt,
    completion: Completion,
    stream: StreamWriter,
) -> Coroutine[Any, Any, None]:
    """Runs one request to its end, and writes its messages to `stream`. The caller releases `prompt`."""
    # Not a coroutine of its own, which every step of the request would pass.
    return RequestExecution(executor, ctx, prompt, completion, stream).run()
