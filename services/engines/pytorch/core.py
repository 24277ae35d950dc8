"""The engine on its thread: model, pool and scheduler, and the life of a request."""

import os
import secrets
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from baton.errors import BatonError, HandoffLost, InvalidRequest
from services.engines.base import EngineLoad, ModelFacts
from services.engines.context import KeptMemory
from services.engines.guidance.vocabulary import open_vocabulary
from services.engines.journal.journal import FoundDecode, Journal
from services.engines.kv import packed_ids
from services.engines.memory.allocation import UNSHARED, AllocationRules, no_free_blocks
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.blocks import HashChain
from services.engines.pytorch.kv_cache.events import CacheListener
from services.engines.pytorch.kv_cache.memory import HostMemory
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.pytorch.lora.layers import NO_SLOT
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.parallel.followers import Followers
from services.engines.pytorch.parts import open_parts
from services.engines.pytorch.runners.fused_runner import FusedRunner
from services.engines.pytorch.sampling.prompt_logprobs import PromptReport
from services.engines.pytorch.sampling.sampling import SamplerState
from services.engines.pytorch.sequence import Event, Failed, Sink, State, TokenSequence
from services.engines.pytorch.speculation.drafting import Drafter
from services.engines.pytorch.steps.outcomes import StepOutcomes
from services.engines.pytorch.steps.pipeline import LOAD_POLL_SECONDS, StepPipeline
from services.engines.pytorch.steps.scheduler import Scheduler, SchedulerLimits
from services.engines.pytorch.steps.tier_loads import BlockReservation

_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class LeftDecode:
    """A decode that an earlier process has left, and its blocks; None if all of it has to be computed again."""

    found: FoundDecode
    reservation: BlockReservation | None


class EngineCore:
    """The engine without threads. Everything runs on the engine's thread, during a step or between two."""

    def __init__(
        self,
        config: PyTorchConfig,
        listener: CacheListener | None = None,
        rules: AllocationRules = UNSHARED,
        followers: Followers | None = None,
        kept: KeptMemory | None = None,
    ) -> None:
        began = time.monotonic()
        self._parts = parts = open_parts(config, listener, followers, kept)
        with ExitStack() as opened:
            opened.callback(parts.close)
            self.followers = followers
            self.lora, self.memory, self.tiers, self.runner = parts.lora, parts.memory, parts.tiers, parts.runner
            self.module = parts.model.module
            self._pool, self._block_tokens = parts.pool, parts.limits.block_tokens
            self._rules = rules
            drafter = Drafter(config.speculation, parts.limits.max_context_tokens) if config.speculation else None
            self.scheduler = Scheduler(self._pool, parts.limits, rules, drafter, self.tiers)
            self._outcomes = StepOutcomes(parts, self.scheduler)
            self.steps = StepPipeline(parts, self.scheduler, self._outcomes, rules)
            self._warm_up()
            self._decodes = [self._left(found) for found in parts.recovered.decodes]
            self._open_facts(config, began)
            opened.pop_all()

    @property
    def recovered(self) -> Sequence[bytes]:
        """The hashes of blocks that an earlier process of the worker has left in the prefix cache."""
        return [link for link in self._parts.recovered.hashes if self._pool.match([link])]

    @property
    def journal(self) -> Journal | None:
        """The journal of its decodes; None if they end with this process."""
        return self._parts.recovered.journal

    def pop_decodes(self) -> list[LeftDecode]:
        """The decodes that an earlier process has left, once."""
        decodes, self._decodes = self._decodes, []
        return decodes

    @property
    def exposes_kv(self) -> bool:
        """True if the memory contains the KV of all heads; not where each rank has a pool of its own."""
        return self.followers is None or self.followers.shard.shares_pool

    @property
    def can_release_memory(self) -> bool:
        """True if the pool is in host memory, and this process's alone."""
        return self.followers is None and isinstance(self.memory, HostMemory)

    def release_memory(self) -> bool:
        """Empties the prefix cache, and frees the pool's memory. False if requests or held blocks use it."""
        self.steps.finish_step()
        if self._pool.used or self.scheduler.waiting:
            return False
        assert isinstance(self.memory, HostMemory)
        if self.tiers is not None:
            self.tiers.settle(range(self.memory.num_blocks))
        self._pool.clear_cache()
        self.memory.clear_all_but(())
        return True

    def distrust_memory(self) -> None:
        """Has the next process drop the KV that outlives this one: the device has failed amid a write."""
        if self._pool.record_of_cache is not None:
            self._pool.record_of_cache.distrust()

    def end_with_ranks(self) -> None:
        """Kills this process, as another rank has ended, if its decodes outlive it: the next one goes on with them."""
        if self.journal is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        """Frees the memory, and ends the other ranks."""
        if self.followers is not None:
            if isinstance(self.runner, FusedRunner):
                self.runner.free_graphs()
            self.followers.close()
        self._parts.close()

    def _open_facts(self, config: PyTorchConfig, began: float) -> None:
        parts, model, limits = self._parts, self._parts.model, self._parts.limits
        files = checkpoint.model_files(config.model)
        self.vocabulary = open_vocabulary(files, model.shape.vocab_size, model.eos_token_ids)
        self.facts = ModelFacts(
            name=config.served_name,
            engine="pytorch",
            max_context_tokens=limits.max_context_tokens,
            vocab_size=model.shape.vocab_size,
            max_logprobs=min(config.max_logprobs, model.shape.vocab_size),
            eos_token_ids=model.eos_token_ids,
            layout=parts.layout,
            files=files,
            load_seconds=time.monotonic() - began,
            images=model.images,
            guided_decoding=self.vocabulary is not None,
            lora=config.lora is not None,
            prompt_logprobs=config.max_logprobs > 0,
            takes_handoffs=self.exposes_kv,
            settings=_settings(config, limits, self._pool.total),
        )

    def new_sequence(
        self, prompt: Prompt, sampling: Sampling, sink: Sink, *, hold: bool, lora_slot: int = NO_SLOT
    ) -> TokenSequence:
        """Creates a request, without submitting it. Safe on every thread."""
        return TokenSequence(
            prompt=prompt,
            sampling=sampling,
            hold=hold,
            chain=HashChain(prompt.cache_salt, self._block_tokens, prompt.media, prompt.chain_seed),
            sampler=SamplerState(prompt, sampling, self._parts.eos_token_ids),
            sink=sink,
            tokens=list(prompt.context),
            lora_slot=lora_slot,
            prompt_report=PromptReport.of(prompt, sampling),
        )

    def submit(self, sequence: TokenSequence) -> None:
        """Queues a request whose prompt is computed here. Raises Overloaded."""
        if not self._outcomes.ended_already(sequence):
            self.scheduler.enqueue(sequence)

    def submit_pulled(self, sequence: TokenSequence, reservation: BlockReservation) -> None:
        """Starts a request on the blocks of its reservation, which now contain its KV."""
        if reservation.state is not State.RESERVED:
            raise HandoffLost("the reservation was released before the request could run")
        if sequence.prompt.emitted == () or reservation.num_tokens >= len(sequence.tokens):
            raise InvalidRequest.of("emitted", "must hold at least the token that follows the pulled ones")
        sequence.computed = reservation.num_tokens
        sequence.cached_tokens = reservation.cached_blocks * self._block_tokens
        sequence.started = time.monotonic()
        sequence.pulled = True
        if self._outcomes.ended_already(sequence):
            self.scheduler.remove(reservation)
            return
        self.scheduler.add_reserved(reservation, sequence)
        self._outcomes.store(sequence)

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
        if self._parts.limits.prefix_cache and reservation.state is State.RESERVED:
            for block, link in zip(reservation.blocks[:num_blocks], reservation.hashes, strict=False):
                self._pool.store(block, link)
        return self.abort(reservation)

    def yield_next(self, sequence: TokenSequence) -> None:
        """Ends a sequence at its next token, to go on elsewhere; at once if it waits for blocks."""
        sequence.yields = True
        self._outcomes.yielding.add(sequence)

    def abort(self, item: TokenSequence | BlockReservation) -> int:
        """Ends a request or reservation in any state; returns how many blocks became free."""
        self.steps.finish_step()
        if isinstance(item, TokenSequence):
            self._outcomes.held.discard(item)
        return self.scheduler.remove(item)

    def fail_all(self, error: BatonError) -> None:
        """Fails every request with `error`. The step in flight is lost."""
        self.steps.drop_step()
        self.scheduler.loans.end_copies()
        for item in [*self.scheduler.running, *self.scheduler.loading, *self.scheduler.waiting]:
            self.abort(item)
            if isinstance(item, TokenSequence):
                item.sink(Failed(error))
            else:
                item.settled(error)

    def load(self) -> EngineLoad:
        """Returns the current load."""
        waiting = [item for item in self.scheduler.waiting if isinstance(item, TokenSequence)]
        own = [*self.scheduler.running, *self.scheduler.loading, *self._outcomes.held]
        filled = sum(sequence.computed for sequence in own) / self._block_tokens
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.loading),
            waiting_prefill_tokens=sum(s.remaining for s in [*waiting, *self.scheduler.running] if s.remaining > 1),
            blocks_total=self._pool.total,
            blocks_used=self._pool.used,
            blocks_held=len(self.scheduler.held),
            empty_blocks=max(0.0, sum(len(sequence.blocks) for sequence in own) - filled),
            memory=self.tiers.sizes() if self.tiers is not None else None,
            retained=self._pool.retained_by(),
        )

    def end_session(self, key: bytes) -> int:
        """Lets blocks be evicted first that no session has but this one. Returns how many."""
        return self._pool.end_session(key)

    def _left(self, found: FoundDecode) -> LeftDecode:
        """Reserves the blocks of a decode, until it goes on."""
        if not found.blocks:
            return LeftDecode(found, None)
        reservation = BlockReservation(found.computed, [], lambda _error: None, State.RESERVED, found.blocks)
        reservation.cached_blocks = min(found.cached_tokens, found.computed) // self._block_tokens
        reservation.granted_ids = packed_ids(found.blocks)
        self.scheduler.reserved += 1
        return LeftDecode(found, reservation)

    def _warm_up(self) -> None:
        """Runs a short prompt and some tokens, so that the first request need not wait for initialization."""
        if self._pool.available * self._block_tokens < self._warm_up_prompt_tokens + _WARM_UP_TOKENS:
            return  # decodes of an earlier process have all blocks, and go on at once
        self._run_short_prompt()
        if self.tiers is None:
            return
        step = statistics.median(self._run_short_prompt() for _ in range(3))
        has_room = self._pool.available * self._block_tokens >= self._block_tokens + 2 * self._warm_up_prompt_tokens
        loads = [self._load_short_prompt(self.tiers, step) for _ in range(3 if has_room else 0)]
        measured = [seconds for seconds in loads if seconds is not None]
        self.tiers.begin(step, statistics.median(measured) if measured else None)

    @property
    def _warm_up_prompt_tokens(self) -> int:
        return min(32, self._parts.limits.max_context_tokens - 1)

    def _run_short_prompt(self) -> float:
        """Runs a prompt of 32 tokens at most; returns the seconds to its first token. Raises its error."""
        sequence = self._run(Prompt((0,) * self._warm_up_prompt_tokens, cache_salt=secrets.token_hex()))
        self._pool.drop(sequence.chain.upto(sequence.tokens, sequence.computed))
        return sequence.first_token_at - sequence.started

    def _load_short_prompt(self, tiers: KvTiers, step_seconds: float) -> float | None:
        """Runs a prompt of which the first block is loaded; returns the seconds of the load, None if it has failed."""
        tokens = min(self._block_tokens + self._warm_up_prompt_tokens, self._parts.limits.max_context_tokens - 1)
        prompt = Prompt((0,) * tokens, cache_salt=secrets.token_hex())
        first = self._run(prompt)
        tiers.settle(self._pool.demote(first.chain.upto(first.tokens, self._block_tokens)))
        tiers.begin(step_seconds, None)  # while nothing is measured, all that is there is loaded
        sequence = self._run(prompt)
        self._pool.drop(sequence.chain.upto(sequence.tokens, sequence.computed))
        return sequence.first_token_at - sequence.started - step_seconds if sequence.loaded_blocks else None

    def _run(self, prompt: Prompt) -> TokenSequence:
        """Runs a prompt and some tokens alone. Raises its error."""
        outcome: list[Event] = []
        sampling = Sampling(max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
        sequence = self.new_sequence(prompt, sampling, outcome.append, hold=False)
        self.submit(sequence)
        while self.steps.step() or self.scheduler.loading:
            if self.scheduler.loading:
                time.sleep(LOAD_POLL_SECONDS)
        if isinstance(outcome[-1], Failed):
            raise outcome[-1].error
        return sequence


def _settings(config: PyTorchConfig, limits: SchedulerLimits, kv_blocks: int) -> tuple[tuple[str, str], ...]:
    return (
        ("kv_blocks", str(kv_blocks)),
        ("max_sequences", str(limits.max_sequences)),
        ("max_step_tokens", str(limits.max_step_tokens)),
        ("max_waiting", str(limits.max_waiting)),
        ("prefix_cache", str(config.prefix_cache).lower()),
    )
