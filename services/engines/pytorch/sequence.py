"""One request inside the engine: its tokens, its blocks, the progress of its KV, and the receiver of its events."""

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from baton.errors import BatonError
from services.engines.answer import Finished, FinishReason, FromTiers, PromptLogprobs, TokenLogprob
from services.engines.journal.slots import Slot
from services.engines.kv_events import KvTier
from services.engines.prompt import MediaSpan, Prompt, Retained, Sampling
from services.engines.pytorch.kv_cache.blocks import HashChain
from services.engines.pytorch.kv_cache.tiers.jobs import PrefixLoad
from services.engines.pytorch.lora.layers import NO_SLOT
from services.engines.pytorch.sampling.prompt_logprobs import LARGEST_CHUNK, PromptReport
from services.engines.pytorch.sampling.sampling import SamplerState
from services.engines.pytorch.speculation.prompt_lookup import DraftState
from services.engines.seals import BlockContents


@dataclass(frozen=True, slots=True)
class Token:
    """One new id."""

    token_id: int
    logprob: TokenLogprob | None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A finished prefill: the first token; the blocks stay until they are released."""

    first_token: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    block_ids: tuple[int, ...]
    num_tokens: int
    prefix_hash: bytes
    cached_tokens: int
    queue_seconds: float
    compute_seconds: float
    prompt_logprobs: PromptLogprobs | None = None
    retained: Retained | None = None
    from_tiers: FromTiers = field(default_factory=FromTiers)


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of a request."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class HeldDecode:
    """A decode that goes on elsewhere; without `held` it had no KV."""

    finished: Finished
    held: Held | None


Event = Token | Finished | Held | HeldDecode | Failed
Sink = Callable[[Event], None]
# Gets the blocks whose KV is complete; none of them once all that it got are lost.
Computed = Callable[[Sequence[int]], None]


class State(enum.Enum):
    """The state of a sequence. Only a running one takes part in steps; a loading, held or reserved one keeps its
    blocks.
    """

    NEW = "new"
    WAITING = "waiting"
    LOADING = "loading"
    RESERVED = "reserved"
    RUNNING = "running"
    HELD = "held"
    DONE = "done"


@dataclass(slots=True)
class InFlight:
    """The part of a sequence that is computed by steps in flight.

    `tokens` get their KV, and `ids` are sampled, by so many `chunks`, which write into its blocks. If a step fails, the
    steps after it are `void`.
    """

    tokens: int = 0
    ids: int = 0
    chunks: int = 0
    is_void: bool = False


@dataclass(eq=False, slots=True)
class TokenSequence:
    """A request's tokens and KV. Belongs to the engine's thread once it is submitted.

    With `hold`, the request ends after the first token and keeps its blocks (prefill).
    """

    prompt: Prompt
    sampling: Sampling
    hold: bool
    chain: HashChain
    sampler: SamplerState
    sink: Sink
    tokens: list[int]
    lora_slot: int = NO_SLOT
    slot: Slot | None = None  # in the journal, if it is to outlive this process
    drafts: DraftState = field(default_factory=DraftState)
    state: State = State.NEW
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: "InFlight" = field(default_factory=lambda: InFlight())
    stored_blocks: int = 0
    cached_tokens: int = 0
    loaded_tokens: dict[KvTier, int] = field(default_factory=dict)  # of cached_tokens, those that were below the pool
    load: PrefixLoad | None = None  # of blocks from a tier below the pool
    loaded_blocks: int = 0  # those that were below the pool, if all that was to be loaded came
    load_end: int = 0  # the blocks of its chain up to the last one to load, while that is prepared
    deferred: int = 0  # steps that have passed while its load was prepared
    parked: BlockContents | None = None  # its unfinished block, while it is preempted
    pulled: bool = False
    yields: bool = False  # ends at its next token, and goes on elsewhere
    passed: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token_at: float = 0.0
    prompt_report: PromptReport | None = None  # until it is sent
    on_progress: Computed | None = None  # is on_progress what is computed before all of it is
    reported_blocks: int = 0
    retained: Retained | None = None
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def reserves(self) -> bool:
        """False: it waits for blocks to compute, not for blocks to pull into."""
        return False

    def gain(self, blocks: Sequence[int]) -> None:
        """Adds blocks to its table, before anything is written into them."""
        self.blocks += blocks
        if self.slot is not None:
            self.slot.grant(self.blocks)

    def lose(self) -> list[int]:
        """Empties its table. Returns the blocks, which the caller then releases."""
        if self.slot is not None:
            self.slot.revoke()
        blocks, self.blocks = self.blocks, []
        return blocks

    def journal(self) -> None:
        """Notes what is computed, and the ids that follow. Call it before anybody is told of them."""
        if self.slot is not None:
            self.slot.advance(self.computed, self.tokens, self.cached_tokens)

    def leave_journal(self) -> None:
        """Has it end with this process: it goes on elsewhere, or its KV is of no use."""
        if self.slot is not None:
            self.slot.close()
            self.slot = None

    def rows_of(self, span: MediaSpan) -> torch.Tensor:
        """Returns the embedding of a medium of the prompt, `[tokens, hidden size]`."""
        if span.start not in self._rows:
            self._rows[span.start] = _rows(span)
        return self._rows[span.start]

    @property
    def generated(self) -> int:
        """The ids after the prompt, including those already emitted."""
        return len(self.tokens) - len(self.prompt.token_ids)

    @property
    def awaits_mask(self) -> bool:
        """True if it must not be in a step before the mask of its next token is ready."""
        guidance = self.sampler.guidance
        return guidance is not None and guidance.awaits_mask

    @property
    def is_recomputable(self) -> bool:
        """True if it can be preempted, and computed again from its ids."""
        return self.prompt.is_computable

    @property
    def remaining(self) -> int:
        """The tokens to compute before the next one can be sampled; those in flight count as computed."""
        return self.length - self.computed - self.in_flight.tokens

    @property
    def length(self) -> int:
        """The tokens of prompt and answer, including the ids being sampled."""
        return len(self.tokens) + self.in_flight.ids

    def report_computed(self, block_tokens: int) -> None:
        """Tells of the blocks that were filled since the last call, if that was asked for."""
        filled = self.computed // block_tokens
        if self.on_progress is not None and filled > self.reported_blocks:
            self.on_progress(self.blocks[self.reported_blocks : filled])
            self.reported_blocks = filled

    def report_lost(self) -> None:
        """Tells that the blocks on_progress of are lost, if there are any."""
        if self.on_progress is not None and self.reported_blocks:
            self.on_progress(())
            self.reported_blocks = 0

    def ends_in_flight(self, max_context_tokens: int) -> bool:
        """True if, as far as is known now, nothing remains to compute after the steps in flight."""
        flying = self.in_flight
        if flying.is_void:
            return True
        full = self.generated + flying.ids >= self.sampling.max_tokens or self.length >= max_context_tokens
        return flying.ids > 0 and (self.hold or self.yields or full)

    def chunk_tokens(self, budget: int) -> int:
        """Returns how many tokens the next chunk may have."""
        return min(self.remaining, budget if self.prompt_report is None else min(budget, LARGEST_CHUNK))

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """Returns the report on the prompt, once, if it was requested."""
        report, self.prompt_report = self.prompt_report, None
        return report.finished() if report is not None else None

    @property
    def queue_seconds(self) -> float:
        """The time from arrival to the first step."""
        return max(0.0, self.started - self.arrived)

    @property
    def from_tiers(self) -> FromTiers:
        """Of the cached tokens, those that were loaded."""
        return FromTiers(self.loaded_tokens.get(KvTier.HOST, 0), self.loaded_tokens.get(KvTier.DISK, 0))

    def finish_reason(self, eos_token_ids: frozenset[int], max_context_tokens: int) -> FinishReason | None:
        """Returns the reason if the newest token is the last one; else None."""
        newest = self.tokens[-1]
        if self.sampler.guidance is not None and newest in eos_token_ids:
            # The grammar allows it only where an answer may end, whatever min_tokens and ignore_eos say.
            return FinishReason.END_OF_SEQUENCE
        if self.generated > self.sampling.min_tokens:
            if newest in eos_token_ids and not self.sampling.ignore_eos:
                return FinishReason.END_OF_SEQUENCE
            if newest in self.sampling.stop_token_ids:
                return FinishReason.STOP_TOKEN
        if self.generated >= self.sampling.max_tokens or len(self.tokens) >= max_context_tokens:
            return FinishReason.LENGTH
        return None

    def finished(self, reason: FinishReason) -> Finished:
        """Returns the last event, with the times until now."""
        now = time.monotonic()
        first = self.first_token_at or now
        return Finished(
            reason=reason,
            prompt_tokens=len(self.prompt.token_ids),
            cached_tokens=self.cached_tokens,
            drafted_tokens=self.drafts.drafted,
            accepted_tokens=self.drafts.accepted,
            queue_seconds=self.queue_seconds,
            prefill_seconds=0.0 if self.pulled else max(0.0, first - (self.started or now)),
            decode_seconds=now - (self.started or now) if self.pulled else now - first,
            retained=self.retained,
            from_tiers=self.from_tiers,
        )


def _rows(span: MediaSpan) -> torch.Tensor:
    embedding = span.embedding
    assert embedding is not None
    # PyTorch would warn about read-only memory; it only reads here.
    data = torch.frombuffer(bytearray(embedding.data), dtype=getattr(torch, embedding.dtype))
    return data.view(embedding.shape)
