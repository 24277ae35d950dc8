"""One decode stream after another, read to the end of the answer: tokens, acceptance, the end, or a yield."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.errors import InvalidReply, Unavailable
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.decoding.state import ExecutionState, HeldHandoff
from router.moving.decodes import ReadDecode, Yielded
from router.routing.latency import DecodeTimer
from router.workers.cancellation import abort_unanswered
from router.workers.decode_calls import DecodeCall
from router.workers.destinations import report_loan
from router.workers.handle import WorkerHandle
from router.workers.replies import check_yielded, reported_logprobs
from rpc.tracing.span import current_span
from runtime.clock import perf_counter_ns


class DecodeReading:
    """Reads the decodes of one request."""

    def __init__(self, state: ExecutionState) -> None:
        self._state = state

    async def read(self, timer: DecodeTimer, emitted: int, worker: WorkerHandle, call: DecodeCall) -> None:
        """Reads a decode of `worker`, before which so many ids were `emitted`, to its end. Raises InvalidReply."""
        state = self._state
        state.meter.begin_call(timer)
        state.stream.lane.attach(state.completion, state.meter, partial(self._answer_ended, call))
        decode = ReadDecode(
            worker, state.ctx, state.routing_request, state.prompt.without_embeddings, state.completion, state.calls
        )
        try:
            state.decodes.add(decode)
            await self._read_stream(call, timer, decode)
        except asyncio.CancelledError:
            if decode.target is not None and state.ctx.keep is None and state.held is None:
                # It may have yielded: this call alone is told of the KV that its worker then holds.
                await abort_unanswered(worker, state.ctx.call_id)
            raise
        finally:
            state.decodes.discard(decode)
            state.stream.lane.detach()
            state.meter.end_call()
            if state.stats.timings.is_traced:
                current_span().set({"baton.completion_tokens": len(state.completion.token_ids) - emitted})

    async def _read_stream(self, call: DecodeCall, timer: DecodeTimer, decode: ReadDecode) -> None:
        """Reads a decode stream to its end, or to a stop string, which the worker does not see.

        The tokens after the first ones are pushed into the lane, unless something is looked for in their text.
        """
        state = self._state
        has_ended = False
        async for response in call.responses:
            if has_ended:
                raise InvalidReply("the decode stream goes on after its last message")
            match response.WhichOneof("event"):
                case "tokens":
                    await self._read_tokens(response.tokens, decode.worker)
                    if state.completion.finished is not None:
                        if state.ends_here:
                            return
                        state.await_answer(0)
                    if state.completion.takes_single_tokens:
                        call.responses.set_sink(state.stream.lane)
                case "accepted":
                    timer.accepted()
                    state.progress.accepted(response.accepted.timings)
                    state.held = state.destination = None
                    call.timing.report(response.accepted.timings)
                case "finished":
                    self._read_end(call, timer, response.finished)
                    # Read on to the status: leaving now would cancel the call on the worker.
                    has_ended = True
                    call.responses.set_sink(None)
                case "yielded":
                    self._end_of_yielded(decode, response.yielded)
                    call.timing.report(response.yielded.timings)
                    has_ended = call.timing.is_complete = True
                    call.responses.set_sink(None)
        if not has_ended and not state.ends_here:
            raise Unavailable("the decode stream ended before its last message")

    def _read_end(self, call: DecodeCall, timer: DecodeTimer, finished: decode_pb2.DecodeFinished) -> None:
        """Ends the completion. Raises InvalidReply if the worker has left out something."""
        state = self._state
        self._check_count(finished.num_tokens)
        timer.finished(finished.timings, len(state.completion.token_ids))
        call.timing.report(finished.timings)
        if not state.completion.token_ids:
            raise InvalidReply("the decode stream ended without a token")
        if not finished.reason and state.completion.finished is None:
            raise InvalidReply("the decode stream ended without a reason")
        self._found_cached(finished.usage)
        if finished.drafted_tokens:
            state.stats.speculated(finished.drafted_tokens, finished.accepted_tokens)
        state.completion.finish(finished.reason)
        call.timing.is_complete = True
        if not state.awaits_answer:
            state.await_answer(0)

    def _check_count(self, num_tokens: int) -> None:
        """Raises InvalidReply if the worker has given another number of ids than have come: where the gap is, or what
        came twice, is not known. A worker that does not count says 0.
        """
        state = self._state
        found = len(state.completion.token_ids)
        if num_tokens and num_tokens != found:
            state.has_gap = True
            raise InvalidReply(f"{found} of the answer's {num_tokens} tokens have come")

    def _found_cached(self, usage: handoff_pb2.PromptUsage) -> None:
        """Notes what a decode worker had in its caches; a later one has the KV that another computed there."""
        state = self._state
        cached_tokens = min(usage.cached_tokens, state.stats.prompt_tokens)
        if not state.has_moved:
            state.stats.decoded(cached_tokens)
            if not state.stats.prefill_worker_id:
                state.stats.found_in_caches(usage)
        state.progress.found_cached(cached_tokens)
        report_loan(state.progress, usage)

    def _end_of_yielded(self, decode: ReadDecode, end: decode_pb2.DecodeYielded) -> None:
        """Takes over the KV of a decode that goes on elsewhere. Raises InvalidReply."""
        state = self._state
        self._check_count(end.num_tokens)
        record, ids = decode.worker.record, state.completion.token_ids
        # Of a kept decode another router may have asked.
        if state.yielded is not None and decode.target is None and decode.calls.reader.attachment <= 1:
            raise InvalidReply("the decode yields again without a token, and was not asked to")
        if end.HasField("handoff"):
            if not ids:
                raise InvalidReply("the decode yields KV before its first token")
            check_yielded(end.handoff, record, decode.num_tokens, ids[-1])
            state.held = HeldHandoff(decode.worker, end.handoff)
            self._found_cached(end.usage)
            state.has_moved = True
        state.yielded = Yielded(decode, state.placer)
        if state.ctx.notes is not None:
            state.ctx.notes.yielded(end.handoff if end.HasField("handoff") else None)
        if end.drafted_tokens:
            state.stats.speculated(end.drafted_tokens, end.accepted_tokens)
        if not state.awaits_answer:
            state.await_answer(0)

    def _answer_ended(self, call: DecodeCall) -> None:
        """A token that was pushed has finished the answer: the worker ends the call, if it knows of this end."""
        if self._state.ends_here:
            call.responses.stop()
        else:
            self._state.await_answer(0)

    async def _read_tokens(self, tokens: decode_pb2.DecodedTokens, worker: WorkerHandle) -> None:
        state = self._state
        count = len(tokens.token_ids)
        if count:
            # Before the client is waited for, which is not the worker's time.
            state.awaits_answer = False
            if state.yielded is not None:
                state.stats.moves += state.yielded.went_on(worker)
                state.yielded = None
        state.meter.arrived(count)
        state.progress.first_token(None)
        state.prompt.release()
        reported = self.reported(tokens.prompt_logprobs) if tokens.HasField("prompt_logprobs") else None
        await self.add_tokens(tokens.token_ids, tokens.logprobs, reported)
        state.meter.passed_on()
        if state.completion.has_overrun:
            raise InvalidReply("tokens came after the end of the answer")
        if state.suspects is not None:
            state.suspects.answered(worker)

    async def add_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.TokenLogprob],
        prompt_logprobs: generate_pb2.PromptLogprobs | None = None,
    ) -> None:
        """Adds tokens to the answer, and sends their text to the client."""
        state, started = self._state, perf_counter_ns()
        if not state.completion.token_ids:
            await state.ctx.inject("detokenize")
        delta = state.completion.push(token_ids, logprobs)
        state.meter.detokenized(started, len(token_ids))
        await state.stream.put(replace(delta, prompt_logprobs=prompt_logprobs) if prompt_logprobs else delta)

    def reported(self, prompt_logprobs: generate_pb2.PromptLogprobs) -> generate_pb2.PromptLogprobs | None:
        """The prompt's log probabilities that a worker has sent, checked. Raises InvalidReply."""
        state = self._state
        return reported_logprobs(prompt_logprobs, state.completion.sampling, state.prompt.without_embeddings)
