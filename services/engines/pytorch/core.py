"""The engine on its thread: model, pool and scheduler, and the life of a request."""

import secrets
import time
from collections.abc import Iterator, Sequence

from baton.errors import BatonError, ComputeFailed, HandoffLost, InvalidRequest
from services.engines import metrics
from services.engines.answer import FinishReason, TokenLogprob
from services.engines.base import EngineLoad
from services.engines.kv import KvLayout
from services.engines.memory.allocation import UNSHARED, AllocationRules, no_free_blocks
from services.engines.prompt import Prompt, Retained, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.facts import facts_of
from services.engines.pytorch.failures import is_out_of_memory, too_large
from services.engines.pytorch.guidance.vocabulary import open_vocabulary
from services.engines.pytorch.kv_cache.blocks import BlockPool, CacheListener
from services.engines.pytorch.kv_cache.memory import DeviceMemory, HostMemory, open_memory
from services.engines.pytorch.kv_cache.pool_size import layout_of, num_blocks, step_tokens
from services.engines.pytorch.kv_cache.prefix import HashChain
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.pytorch.lora.layers import NO_SLOT, LoraLayers
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import LoadedModel, load_model
from services.engines.pytorch.parallel.followers import Followers
from services.engines.pytorch.parallel.shards import WHOLE, part_of_pool
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.fused_runner import FusedRunner, Sizes
from services.engines.pytorch.runners.runner import InflightStep, StepRunner
from services.engines.pytorch.runners.selection import fused_runner, open_runner
from services.engines.pytorch.sampling.prompt_logprobs import PromptReport
from services.engines.pytorch.sampling.sampling import Chosen, SamplerState
from services.engines.pytorch.scheduler import BlockReservation, Scheduler, SchedulerLimits
from services.engines.pytorch.sequence import Event, Failed, Held, HeldDecode, Sink, State, Token, TokenSequence
from services.engines.pytorch.speculation.drafting import Drafter

_MASK_POLL_SECONDS = 0.002
_LOAD_POLL_SECONDS = 0.001
_UNENDED = (State.NEW, State.WAITING, State.LOADING, State.RUNNING)


class EngineCore:
    """The engine without threads. Everything runs on the engine's thread, during a step or between two."""

    def __init__(
        self,
        config: PyTorchConfig,
        listener: CacheListener | None = None,
        rules: AllocationRules = UNSHARED,
        followers: Followers | None = None,
    ) -> None:
        began = time.monotonic()
        model = load_model(config, followers.shard if followers else WHOLE)
        self.followers = followers
        self._layout = layout = layout_of(config, model)
        self.lora = LoraLayers(model.module, config.lora.max_loaded, config.lora.max_rank) if config.lora else None
        blocks = num_blocks(config, model, layout)
        blocks = followers.least_blocks(blocks) if followers else blocks
        self.device: str = model.device.type
        self.memory: HostMemory | DeviceMemory = open_memory(layout, blocks, model.device)
        self._pool = BlockPool(blocks, listener, config.retained_share)
        self.tiers = self._open_tiers(config, layout, listener)
        self.module = model.module
        self._prefix_cache = config.prefix_cache
        self._max_context_tokens = min(model.shape.max_context_tokens, self._pool.total * layout.block_tokens)
        limits = SchedulerLimits.of(
            config, step_tokens(config, self.device), layout.block_tokens, self._max_context_tokens
        )
        self.runner = self._open_runner(config, model, limits)
        self._rules = rules
        self._stuck_since: float | None = None
        drafter = Drafter(config.speculation, self._max_context_tokens) if config.speculation else None
        self.scheduler = Scheduler(self._pool, limits, rules, drafter, self.tiers)
        self._inflight: InflightStep | None = None
        # Sequences that ended while a step in flight still writes into their blocks, with the event to send afterwards.
        self._leaving: list[tuple[TokenSequence, Event]] = []
        self._held: set[TokenSequence] = set()
        self._yielding: set[TokenSequence] = set()  # until they end
        self.eos_token_ids = frozenset(model.eos_token_ids)
        self._warm_up()
        files = checkpoint.model_files(config.model)
        self.vocabulary = open_vocabulary(files, model.shape.vocab_size, model.eos_token_ids)
        self.facts = facts_of(
            config,
            model,
            layout,
            limits,
            files,
            kv_blocks=self._pool.total,
            guided_decoding=self.vocabulary is not None,
            takes_handoffs=self.exposes_kv,
            load_seconds=time.monotonic() - began,
        )

    @property
    def exposes_kv(self) -> bool:
        """True if the memory contains the KV of all heads; not where each rank has a pool of its own."""
        return self.followers is None or self.followers.shard.shares_pool

    def close(self) -> None:
        """Frees the memory, and ends the other ranks."""
        if self.followers is not None:
            if isinstance(self.runner, FusedRunner):
                self.runner.free_graphs()
            self.followers.close()
        if self.tiers is not None:
            self.tiers.close()
        self.memory.close()

    def _open_tiers(self, config: PyTorchConfig, layout: KvLayout, listener: CacheListener | None) -> KvTiers | None:
        if config.tiers is None:
            return None
        tiers = KvTiers(config.tiers, layout, self.memory.tensor, listener or (lambda _: None))
        self._pool.lower = tiers
        return tiers

    def _open_runner(self, config: PyTorchConfig, model: LoadedModel, limits: SchedulerLimits) -> StepRunner:
        sizes = Sizes(limits.max_sequences, limits.max_context_tokens, limits.block_tokens, graphs=config.cuda_graphs)
        followers, pool = self.followers, self.memory.tensor
        if followers is None:
            return open_runner(config, model, pool, self._layout, sizes, self.lora)
        ranks = followers.begin(len(pool), sizes, self.memory.file_descriptor, model.device)
        return fused_runner(model, part_of_pool(pool, model.shard), sizes, ranks, followers.send)

    def new_sequence(
        self, prompt: Prompt, sampling: Sampling, sink: Sink, *, hold: bool, lora_slot: int = NO_SLOT
    ) -> TokenSequence:
        """Creates a request, without submitting it. Safe on every thread."""
        return TokenSequence(
            prompt=prompt,
            sampling=sampling,
            hold=hold,
            chain=HashChain(prompt.cache_salt, self._layout.block_tokens, prompt.media, prompt.chain_seed),
            sampler=SamplerState(prompt, sampling, self.eos_token_ids),
            sink=sink,
            tokens=list(prompt.context),
            lora_slot=lora_slot,
            prompt_report=PromptReport.of(prompt, sampling),
        )

    def submit(self, sequence: TokenSequence) -> None:
        """Queues a request whose prompt is computed here. Raises Overloaded."""
        if not self._ended_already(sequence):
            self.scheduler.enqueue(sequence)

    def submit_pulled(self, sequence: TokenSequence, reservation: BlockReservation) -> None:
        """Starts a request on the blocks of its reservation, which now contain its KV."""
        if reservation.state is not State.RESERVED:
            raise HandoffLost("the reservation was released before the request could run")
        if sequence.prompt.emitted == () or reservation.num_tokens >= len(sequence.tokens):
            raise InvalidRequest.of("emitted", "must hold at least the token that follows the pulled ones")
        sequence.computed = reservation.num_tokens
        sequence.cached_tokens = reservation.cached_blocks * self.facts.layout.block_tokens
        sequence.started = time.monotonic()
        sequence.pulled = True
        if self._ended_already(sequence):
            self.scheduler.remove(reservation)
            return
        self.scheduler.add_reserved(reservation, sequence)
        self._store(sequence)

    def reserve(self, reservation: BlockReservation) -> None:
        """Queues a reservation. Raises Overloaded."""
        self.scheduler.enqueue(reservation)

    def give_up_if_held_up(self, reservation: BlockReservation) -> None:
        """Fails a reservation that has waited too long for held KV."""
        if self.scheduler.is_held_up(reservation):
            self.scheduler.remove(reservation)
            reservation.settled(no_free_blocks(self._rules))

    def cache(self, reservation: BlockReservation, num_blocks: int) -> int:
        """Frees a reservation; the prefix cache keeps the full ones of its first `num_blocks`, which have their KV."""
        if self._prefix_cache and reservation.state is State.RESERVED:
            for block, link in zip(reservation.blocks[:num_blocks], reservation.hashes, strict=False):
                self._pool.store(block, link)
        return self.abort(reservation)

    def yield_next(self, sequence: TokenSequence) -> None:
        """Ends a sequence at its next token, to go on elsewhere; at once if it waits for blocks."""
        sequence.yields = True
        self._yielding.add(sequence)

    def abort(self, item: TokenSequence | BlockReservation) -> int:
        """Ends a request or reservation in any state; returns how many blocks became free."""
        self.finish_step()
        if isinstance(item, TokenSequence):
            self._held.discard(item)
        return self.scheduler.remove(item)

    def step(self) -> bool:
        """Starts a step, and completes the previous one, if it is in flight. Returns False if there was
        nothing to do.
        """
        if self._yielding:
            self._yield_waiting()
        inflight, self._inflight = self._inflight, None
        if inflight is None:
            chunks = self.scheduler.schedule()
        else:
            chunks = self.scheduler.schedule_ahead() if inflight.may_be_followed else []
        if chunks:
            self._inflight = self._start(chunks)
        if inflight is not None:
            self._process(inflight)
        elif not chunks:
            return self._fail_if_stuck()
        self._stuck_since = None
        if self._inflight is not None and not self._inflight.may_be_followed:
            self.finish_step()
        return True

    def finish_step(self) -> None:
        """Waits for the step in flight, if there is one, and processes its outcome."""
        inflight, self._inflight = self._inflight, None
        if inflight is not None:
            self._process(inflight)

    def _start(self, chunks: list[Chunk]) -> InflightStep | None:
        """Starts a step. If it runs out of memory, only the request that needs the most memory fails."""
        if self.tiers is not None:
            self.tiers.settle(_written(chunks, self._layout.block_tokens))
        try:
            inflight = self.runner.start(chunks)
        except RuntimeError as error:
            self._drop_largest(chunks, error)
            return None
        for chunk in chunks:
            chunk.sequence.in_flight.tokens += chunk.count
            chunk.sequence.in_flight.ids += chunk.samples
        return inflight

    def _drop_largest(self, chunks: Sequence[Chunk], error: RuntimeError) -> None:
        """Fails the request that needs the most memory, so that the step can be tried again. Raises other errors."""
        if self.followers is not None or not is_out_of_memory(error):
            raise error  # the other ranks wait amid this step: the group cannot go on
        largest = max(chunks, key=lambda chunk: (chunk.count, chunk.end)).sequence
        self._leave(largest, Failed(too_large()))

    def _process(self, inflight: InflightStep) -> None:
        shortage = None
        try:
            outcomes = inflight.outcomes()
        except RuntimeError as error:  # sampling on the host allocates, and no step follows such a step
            outcomes, shortage = [None] * len(inflight.chunks), error
        for chunk, chosen in zip(inflight.chunks, outcomes, strict=True):
            flying = chunk.sequence.in_flight
            flying.tokens -= chunk.count
            flying.ids -= chunk.samples
            if shortage is None and chunk.sequence.state is State.RUNNING and not flying.is_void:
                self._advance(chunk, chosen)
            flying.is_void = flying.is_void and flying.tokens > 0
        if shortage is not None:
            self._drop_largest(inflight.chunks, shortage)
        leaving, self._leaving = self._leaving, []
        for sequence, event in leaving:
            self._leave(sequence, event)

    def _leave(self, sequence: TokenSequence, event: Event) -> None:
        """Frees a sequence's blocks and sends its last event, once no step writes into them any more."""
        if not sequence.in_flight.tokens:
            self.scheduler.remove(sequence)
            sequence.sink(event)
            return
        if sequence.state is not State.DONE:
            self.scheduler.retire(sequence)
        self._leaving.append((sequence, event))

    @property
    def patience_seconds(self) -> float | None:
        """When to step again even if nothing happens; None for never."""
        if any(sequence.awaits_mask for sequence in self.scheduler.running):
            return _MASK_POLL_SECONDS
        if self.tiers is not None and self.tiers.is_busy:
            return _LOAD_POLL_SECONDS
        if self._stuck_since is None:
            return None
        return max(0.0, self._stuck_since + self._rules.held_wait_seconds - time.monotonic())

    def _fail_if_stuck(self) -> bool:
        """If all running sequences wait for a block and none can be preempted, fails the newest of them.

        It waits while a pull is running, which will end. It waits only briefly for KV that is held for other workers,
        since they may be waiting for this worker.
        """
        stuck = {block for sequence in self.scheduler.running for block in sequence.blocks}
        is_going_on = any(sequence.awaits_mask for sequence in self.scheduler.running)
        if not stuck or self.scheduler.reserved or self.scheduler.loading or is_going_on:
            self._stuck_since = None
            return False
        if self._pool.used > len(stuck):
            self._stuck_since = self._stuck_since or time.monotonic()
            if self.patience_seconds:
                return False
        self._stuck_since = None
        sequence = self.scheduler.running[-1]
        self.abort(sequence)
        sequence.sink(
            Failed(HandoffLost("its blocks were needed, and without the embeddings it cannot be run again here"))
        )
        return True

    def fail_all(self, error: BatonError) -> None:
        """Fails every request with `error`. The step in flight is lost."""
        self._inflight = None
        for item in [*self.scheduler.running, *self.scheduler.loading, *self.scheduler.waiting]:
            self.abort(item)
            if isinstance(item, TokenSequence):
                item.sink(Failed(error))
            else:
                item.settled(error)

    def load(self) -> EngineLoad:
        """Returns the current load."""
        waiting = [item for item in self.scheduler.waiting if isinstance(item, TokenSequence)]
        own = [*self.scheduler.running, *self.scheduler.loading, *self._held]
        filled = sum(sequence.computed for sequence in own) / self._layout.block_tokens
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.loading),
            waiting_prefill_tokens=sum(s.remaining for s in [*waiting, *self.scheduler.running] if s.remaining > 1),
            blocks_total=self._pool.total,
            blocks_used=self._pool.used,
            blocks_held=sum(len(sequence.blocks) for sequence in self._held),
            empty_blocks=max(0.0, sum(len(sequence.blocks) for sequence in own) - filled),
            memory=self.tiers.sizes() if self.tiers is not None else None,
        )

    def _advance(self, chunk: Chunk, chosen: Chosen | None) -> None:
        sequence = chunk.sequence
        if chosen is not None and chosen.is_unsettled:
            sequence.sampler.needs_all_candidates = sequence.in_flight.is_void = True
            return
        if chosen is not None and chosen.token_id is None:
            self._fail(sequence)
            return
        guidance = sequence.sampler.guidance
        if guidance is not None and guidance.failure is not None:
            self._leave(sequence, Failed(guidance.failure))
            return
        sequence.computed = chunk.end - len(chunk.drafts)
        self._store(sequence)
        if chosen is None:
            sequence.report_computed(self._layout.block_tokens)
        elif chosen.token_id is not None:
            sequence.drafts.drafted += len(chunk.drafts)
            self._append(sequence, chosen.token_id, chosen)
            if chunk.drafts:
                self._append_confirmed(chunk, chosen.more)

    def _append_confirmed(self, chunk: Chunk, more: Sequence[Chosen]) -> None:
        """Appends the tokens after confirmed drafts, whose KV the step has computed. That of other drafts stays in the
        blocks, after the sequence's end, until it is overwritten.
        """
        sequence, accepted = chunk.sequence, 0
        for chosen in more:
            if sequence.state is not State.RUNNING:
                break
            sequence.computed += 1
            self._store(sequence)
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
        if not sequence.first_token_at:
            self._note_first_token(sequence)
            self._retain(sequence)
        reason = sequence.finish_reason(self.eos_token_ids, self._max_context_tokens)
        if sequence.hold:
            self._hold(sequence, chosen, reason)
            return
        sequence.sink(Token(token_id, chosen.logprob, sequence.pop_prompt_logprobs()))
        if reason is not None:
            self._leave(sequence, sequence.finished(reason))
        elif sequence.yields:
            self._held.add(sequence)
            self.scheduler.keep(sequence)
            held = self._held_event(sequence, None, None)
            sequence.sink(HeldDecode(sequence.finished(FinishReason.YIELDED), held))

    def _yield_waiting(self) -> None:
        """Ends the sequences that are to go on elsewhere and have no blocks."""
        self._yielding = {one for one in self._yielding if one.state in _UNENDED}
        for sequence in [one for one in self._yielding if one.state is State.WAITING]:
            self.scheduler.remove(sequence)
            sequence.sink(HeldDecode(sequence.finished(FinishReason.YIELDED), None))

    def _note_first_token(self, sequence: TokenSequence) -> None:
        sequence.first_token_at = time.monotonic()
        if self.tiers is None or sequence.pulled:
            return
        self.tiers.found(len(sequence.prompt.token_ids), sequence.cached_tokens, sequence.loaded_tokens)
        if not sequence.loaded_tokens:
            tokens = sequence.computed - sequence.cached_tokens
            self.tiers.rates.computed(tokens, sequence.first_token_at - sequence.started)

    def _hold(self, sequence: TokenSequence, chosen: Chosen, reason: FinishReason | None) -> None:
        if reason is None:
            self.scheduler.hold(sequence)
            self._held.add(sequence)
        else:
            self.scheduler.remove(sequence)
        sequence.sink(self._held_event(sequence, chosen.logprob, reason))

    def _held_event(self, sequence: TokenSequence, logprob: TokenLogprob | None, reason: FinishReason | None) -> Held:
        num_tokens = sequence.computed
        # Drafts that were not confirmed may have taken one more.
        count = -(-num_tokens // self._layout.block_tokens)
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

    def _ended_already(self, sequence: TokenSequence) -> bool:
        """True if the ids that the client already has are the whole answer; if so, sends the last event."""
        if not sequence.prompt.emitted:
            return False
        reason = sequence.finish_reason(self.eos_token_ids, self._max_context_tokens)
        if reason is not None:
            sequence.state = State.DONE
            sequence.sink(sequence.finished(reason))
        return reason is not None

    def _store(self, sequence: TokenSequence) -> None:
        """Adds the sequence's newly filled blocks to the prefix cache."""
        if not self._prefix_cache:
            return
        links = sequence.chain.upto(sequence.tokens, sequence.computed)
        for index in range(sequence.stored_blocks, len(links)):
            self._pool.store(sequence.blocks[index], links[index])
        sequence.stored_blocks = len(links)

    def _retain(self, sequence: TokenSequence) -> None:
        """Retains the beginning of a prompt that has been computed, if the request asks for it."""
        wanted = sequence.prompt.retain
        if wanted is None or not self._prefix_cache:
            return
        prompt_tokens = min(len(sequence.prompt.token_ids), sequence.computed)
        links = sequence.chain.upto(sequence.tokens, min(wanted.tokens or prompt_tokens, prompt_tokens))
        if granted := self._pool.retain(links, wanted):
            tokens = granted * self._layout.block_tokens
            sequence.retained = Retained(tokens, time.time() + wanted.seconds)

    def end_session(self, key: bytes) -> int:
        """Lets blocks be evicted first that no session has but this one. Returns how many."""
        return self._pool.end_session(key)

    def _fail(self, sequence: TokenSequence) -> None:
        """Fails a request whose numbers overflowed, and zeroes its blocks: NaN would spread even through a mask."""
        blocks = self._pool.forget(sequence.blocks)
        if self.tiers is not None:
            self.tiers.settle(blocks)
        self.memory.tensor[blocks] = 0
        if self.followers is not None:
            self.followers.zero(blocks)
        self._leave(sequence, Failed(ComputeFailed("the model computed NaN or infinity for this request")))

    def _warm_up(self) -> None:
        """Runs a short prompt and some tokens, so that the first request need not wait for initialization."""
        outcome: list[Event] = []
        prompt = Prompt((0,) * min(32, self._max_context_tokens - 1), cache_salt=secrets.token_hex())
        sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
        self.submit(self.new_sequence(prompt, sampling, outcome.append, hold=False))
        while self.step():
            pass
        self._pool.clear_cache()
        if self.tiers is not None:
            self.tiers.begin()
        if isinstance(outcome[-1], Failed):
            raise outcome[-1].error


def _written(chunks: Sequence[Chunk], block_tokens: int) -> Iterator[int]:
    """Yields the blocks that a step writes."""
    for chunk in chunks:
        yield from chunk.sequence.blocks[chunk.start // block_tokens : -(-chunk.end // block_tokens)]
