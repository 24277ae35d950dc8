"""The outcomes of steps: tokens are appended and sent, filled blocks are cached, and sequences end or are held."""

import time
from collections.abc import Sequence

from baton.errors import ComputeFailed
from services.engines.answer import FinishReason, TokenLogprob
from services.engines.prompt import Retained
from services.engines.pytorch.parts import EngineParts
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.sampling.sampling import Chosen
from services.engines.pytorch.sequence import Event, Failed, Held, HeldDecode, State, Token, TokenSequence
from services.engines.pytorch.steps.scheduler import Scheduler
from services.engines.running import metrics

# To free so many blocks takes a good part of a millisecond: clients get the step's tokens before.
_MANY_BLOCKS = 64
_UNENDED = (State.NEW, State.WAITING, State.LOADING, State.RUNNING)


class StepOutcomes:
    """Applies the outcomes of steps to sequences.

    `held` are those whose blocks wait for other workers, `yielding` those that are to go on elsewhere, until they end.
    """

    def __init__(self, parts: EngineParts, scheduler: Scheduler) -> None:
        self.held: set[TokenSequence] = set()
        self.yielding: set[TokenSequence] = set()
        # Sequences that ended with many blocks, or while a step in flight still writes into them, and the event to send
        # once they are free.
        self._leaving: list[tuple[TokenSequence, Event]] = []
        self._parts = parts
        self._scheduler = scheduler
        self._pool = parts.pool
        self._tiers = parts.tiers
        self._block_tokens = parts.limits.block_tokens
        self._prefix_cache = parts.limits.prefix_cache
        self._max_context_tokens = parts.limits.max_context_tokens
        self._eos_token_ids = parts.eos_token_ids

    def advance(self, chunk: Chunk, chosen: Chosen | None) -> None:
        """Notes that a chunk is computed, and the token that follows it, if one was chosen."""
        sequence = chunk.sequence
        if chosen is not None and chosen.is_unsettled:
            sequence.sampler.needs_all_candidates = sequence.in_flight.is_void = True
            return
        if chosen is not None and chosen.token_id is None:
            self._fail(sequence)
            return
        guidance = sequence.sampler.guidance
        if guidance is not None and guidance.failure is not None:
            self.leave(sequence, Failed(guidance.failure))
            return
        sequence.computed = chunk.end - len(chunk.drafts)
        self.store(sequence)
        if chosen is None:
            sequence.journal()
            sequence.report_computed(self._block_tokens)
        elif chosen.token_id is not None:
            sequence.drafts.drafted += len(chunk.drafts)
            self._append(sequence, chosen.token_id, chosen)
            if chunk.drafts:
                self._append_confirmed(chunk, chosen.more)

    def leave(self, sequence: TokenSequence, event: Event) -> None:
        """Frees a sequence's blocks and sends its last event, once no step writes into them any more."""
        if not sequence.in_flight.chunks:
            self._scheduler.remove(sequence)
            sequence.sink(event)
        else:
            self._leave_later(sequence, event)

    def _leave_later(self, sequence: TokenSequence, event: Event) -> None:
        if sequence.state is not State.DONE:
            self._scheduler.retire(sequence)
        self._leaving.append((sequence, event))

    @property
    def are_leaving(self) -> bool:
        """True if sequences have ended whose blocks are not free yet."""
        return bool(self._leaving)

    def end_leaving(self) -> None:
        """After a step: ends the sequences that it has still written into, and those with many blocks."""
        leaving, self._leaving = self._leaving, []
        for sequence, event in leaving:
            self.leave(sequence, event)

    def yield_waiting(self) -> None:
        """Ends the sequences that are to go on elsewhere and have no blocks."""
        self.yielding = {one for one in self.yielding if one.state in _UNENDED}
        for sequence in [one for one in self.yielding if one.state is State.WAITING]:
            self._scheduler.remove(sequence)
            sequence.sink(HeldDecode(sequence.finished(FinishReason.YIELDED), None))

    def ended_already(self, sequence: TokenSequence) -> bool:
        """True if the ids that the client already has are the whole answer; if so, sends the last event."""
        if not sequence.prompt.emitted:
            return False
        reason = sequence.finish_reason(self._eos_token_ids, self._max_context_tokens)
        if reason is not None:
            sequence.state = State.DONE
            sequence.sink(sequence.finished(reason))
        return reason is not None

    def store(self, sequence: TokenSequence) -> None:
        """Adds the sequence's newly filled blocks to the prefix cache."""
        if not self._prefix_cache:
            return
        links = sequence.chain.upto(sequence.tokens, sequence.computed)
        for index in range(sequence.stored_blocks, len(links)):
            self._pool.store(sequence.blocks[index], links[index])
        sequence.stored_blocks = len(links)

    def _append_confirmed(self, chunk: Chunk, more: Sequence[Chosen]) -> None:
        """Appends the tokens after confirmed drafts, whose KV the step has computed. That of other drafts stays in the
        blocks, after the sequence's end, until it is overwritten.
        """
        sequence, accepted = chunk.sequence, 0
        for chosen in more:
            if sequence.state is not State.RUNNING:
                break
            sequence.computed += 1
            self.store(sequence)
            sequence.drafts.accepted += 1
            accepted += 1
            assert chosen.token_id is not None
            self._append(sequence, chosen.token_id, chosen)
        metrics.DRAFTED_TOKENS.inc(len(chunk.drafts))
        metrics.ACCEPTED_TOKENS.inc(accepted)
        sequence.drafts.record(accepted, len(sequence.tokens))

    def _append(self, sequence: TokenSequence, token_id: int, chosen: Chosen) -> None:
        sequence.tokens.append(token_id)
        sequence.sampler.append(token_id)
        sequence.journal()
        if not sequence.first_token_at:
            self._record_first_token(sequence)
            self._retain(sequence)
        reason = sequence.finish_reason(self._eos_token_ids, self._max_context_tokens)
        if sequence.hold:
            self._hold(sequence, chosen, reason)
            return
        sequence.sink(Token(token_id, chosen.logprob, sequence.pop_prompt_logprobs()))
        if reason is not None and len(sequence.blocks) > _MANY_BLOCKS:
            self._leave_later(sequence, sequence.finished(reason))
        elif reason is not None:
            self.leave(sequence, sequence.finished(reason))
        elif sequence.yields:
            self._yield(sequence)

    def _yield(self, sequence: TokenSequence) -> None:
        """Ends a sequence that is to go on elsewhere, and holds its blocks."""
        self.held.add(sequence)
        self._scheduler.keep(sequence)
        sequence.leave_journal()
        held = self._held_event(sequence, None, None)
        sequence.sink(HeldDecode(sequence.finished(FinishReason.YIELDED), held))

    def _hold(self, sequence: TokenSequence, chosen: Chosen, reason: FinishReason | None) -> None:
        if reason is None:
            self._scheduler.hold(sequence)
            self.held.add(sequence)
        else:
            self._scheduler.remove(sequence)
        sequence.sink(self._held_event(sequence, chosen.logprob, reason))

    def _held_event(self, sequence: TokenSequence, logprob: TokenLogprob | None, reason: FinishReason | None) -> Held:
        num_tokens = sequence.computed
        # Drafts that were not confirmed may have taken one more.
        count = -(-num_tokens // self._block_tokens)
        return Held(
            first_token=sequence.tokens[-1],
            logprob=logprob,
            finish_reason=reason,
            block_ids=tuple(sequence.blocks[:count]),
            num_tokens=num_tokens,
            prefix_hash=sequence.chain.value(sequence.tokens, num_tokens),
            cached_tokens=sequence.cached_tokens,
            queue_seconds=sequence.queue_seconds,
            compute_seconds=sequence.first_token_at - sequence.started,
            prompt_logprobs=sequence.pop_prompt_logprobs(),
            retained=sequence.retained,
            from_tiers=sequence.from_tiers,
        )

    def _record_first_token(self, sequence: TokenSequence) -> None:
        sequence.first_token_at = time.monotonic()
        if self._tiers is None or sequence.pulled:
            return
        self._tiers.found(len(sequence.prompt.token_ids), sequence.cached_tokens, sequence.loaded_tokens)
        tokens, seconds = sequence.computed - sequence.cached_tokens, sequence.first_token_at - sequence.started
        if not sequence.loaded_tokens:
            self._tiers.rates.computed(tokens, seconds)
        elif sequence.loaded_blocks:
            self._tiers.rates.resumed(max(sequence.loaded_tokens), sequence.loaded_blocks, tokens, seconds)

    def _retain(self, sequence: TokenSequence) -> None:
        """Retains the beginning of a prompt that has been computed, if the request asks for it."""
        wanted = sequence.prompt.retain
        if wanted is None or not self._prefix_cache:
            return
        prompt_tokens = min(len(sequence.prompt.token_ids), sequence.computed)
        links = sequence.chain.upto(sequence.tokens, min(wanted.tokens or prompt_tokens, prompt_tokens))
        if granted := self._pool.retain(links, wanted):
            tokens = granted * self._block_tokens
            sequence.retained = Retained(tokens, time.time() + wanted.seconds)

    def _fail(self, sequence: TokenSequence) -> None:
        """Fails a request whose numbers overflowed, and zeroes its blocks: NaN would spread even through a mask."""
        sequence.leave_journal()
        self._parts.zero(self._pool.forget(sequence.blocks))
        self.leave(sequence, Failed(ComputeFailed("the model computed NaN or infinity for this request")))
