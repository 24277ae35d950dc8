"""One request inside the engine: its tokens, its blocks, how far its KV is computed, and who hears of it."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rpc.errors import BatonError
from services.answer import Finished, FinishReason, TokenLogprob
from services.engines.pytorch.prefix import HashChain
from services.engines.pytorch.sampling import SamplerState
from services.prompt import MediaSpan, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Token:
    """One new id."""

    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Held:
    """A finished prefill: the first token, and the blocks that stay until they are released."""

    first_token: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    block_ids: tuple[int, ...]
    num_tokens: int
    prefix_hash: bytes
    cached_tokens: int
    queue_seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that could not be completed."""

    error: BatonError


Event = Token | Finished | Held | Failed
Sink = Callable[[Event], None]


class State(enum.Enum):
    """Where a sequence is. Only a running one takes part in steps; a held or reserved one keeps its blocks."""

    NEW = "new"
    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    HELD = "held"
    DONE = "done"


@dataclass(eq=False, slots=True)
class TokenSequence:
    """A request's tokens and KV. Owned by the engine's thread once it has been submitted.

    `hold` keeps the blocks after the first token (prefill), instead of going on to the end.
    """

    prompt: Prompt
    sampling: Sampling
    hold: bool
    chain: HashChain
    sampler: SamplerState
    sink: Sink
    tokens: list[int]
    state: State = State.NEW
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    stored_blocks: int = 0
    cached_tokens: int = 0
    pulled: bool = False
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token_at: float = 0.0
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def rows_of(self, span: MediaSpan) -> torch.Tensor:
        """The embedding of one of the prompt's media, `[tokens, hidden size]`."""
        if span.start not in self._rows:
            self._rows[span.start] = _rows(span)
        return self._rows[span.start]

    @property
    def generated(self) -> int:
        """Ids after the prompt, those already emitted included."""
        return len(self.tokens) - len(self.prompt.token_ids)

    @property
    def is_recomputable(self) -> bool:
        """Whether it can be run again from its ids, after giving its blocks back."""
        return self.prompt.is_computable

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def queue_seconds(self) -> float:
        """From arrival to the first step."""
        return max(0.0, self.started - self.arrived)

    def finish_reason(self, eos_token_ids: frozenset[int], max_context_tokens: int) -> FinishReason | None:
        """Whether the newest token is the last one."""
        newest = self.tokens[-1]
        if self.generated > self.sampling.min_tokens:
            if newest in eos_token_ids and not self.sampling.ignore_eos:
                return FinishReason.END_OF_SEQUENCE
            if newest in self.sampling.stop_token_ids:
                return FinishReason.STOP_TOKEN
        if self.generated >= self.sampling.max_tokens or len(self.tokens) >= max_context_tokens:
            return FinishReason.LENGTH
        return None

    def finished(self, reason: FinishReason) -> Finished:
        """The last event, with the times until now."""
        now = time.monotonic()
        first = self.first_token_at or now
        return Finished(
            reason=reason,
            prompt_tokens=len(self.prompt.token_ids),
            cached_tokens=self.cached_tokens,
            queue_seconds=self.queue_seconds,
            prefill_seconds=0.0 if self.pulled else max(0.0, first - (self.started or now)),
            decode_seconds=now - (self.started or now) if self.pulled else now - first,
        )


def _rows(span: MediaSpan) -> torch.Tensor:
    embedding = span.embedding
    assert embedding is not None
    # PyTorch reads memory in place, and warns where it could not also write.
    data = torch.frombuffer(bytearray(embedding.data), dtype=getattr(torch, embedding.dtype))
    return data.view(embedding.shape)
