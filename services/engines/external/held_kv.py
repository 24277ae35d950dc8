"""KV that an engine holds for other workers, by our own count, since it does not report it."""

import asyncio
import math
from dataclasses import dataclass

from runtime.clock import monotonic
from services.engines.answer import FinishReason, PromptLogprobs, TokenLogprob

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Held:
    tokens: int
    since: float
    timer: asyncio.TimerHandle


class HeldHandoffs:
    """Counts the KV that is held, in blocks and tokens. The engine frees it by itself after `timeout_seconds`."""

    def __init__(self, timeout_seconds: float, block_tokens: int) -> None:
        self._timeout_seconds = timeout_seconds
        self._block_tokens = block_tokens
        self._held: dict[object, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self._held.values())

    @property
    def blocks(self) -> int:
        return sum(-(-each.tokens // self._block_tokens) for each in self._held.values())

    @property
    def oldest_seconds(self) -> float:
        """The age of the oldest handoff; 0 if none is held."""
        return max((monotonic() - each.since for each in self._held.values()), default=0.0)

    @property
    def youngest_seconds(self) -> float:
        """The age of the newest handoff; infinite if none is held."""
        return min((monotonic() - each.since for each in self._held.values()), default=math.inf)

    def hold(self, key: object, tokens: int) -> None:
        """Counts KV until `free`, or until the engine's own timeout frees it."""
        timer = asyncio.get_running_loop().call_later(self._timeout_seconds, self.free, key)
        self._held[key] = _Held(tokens, monotonic(), timer)

    def free(self, key: object) -> int:
        """Stops counting KV, since it is free. Returns its number of blocks, 0 if it was freed already."""
        each = self._held.pop(key, None)
        if each is None:
            return 0
        each.timer.cancel()
        return -(-each.tokens // self._block_tokens)

    async def outlived(self, seconds: float) -> None:
        """Waits until nothing is held, or until `seconds` after the newest handoff, when all reads are over."""
        while len(self) and self.youngest_seconds < seconds:  # noqa: ASYNC110 - waits for time to pass
            await asyncio.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Cancels the timers."""
        for key in list(self._held):
            self.free(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalPrefill:
    """The answer of a prefill. `engine_state` is empty if the first token ended the request, so that no KV is held."""

    first_token: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    num_tokens: int
    cached_tokens: int
    compute_seconds: float
    queue_seconds: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    engine_state: bytes = b""


class ExternalKv:
    """The facts of an EngineHeldKv; a subclass says how it is released. It has no blocks of a pool of ours."""

    block_ids: tuple[int, ...] = ()
    prefix_hash = b""

    def __init__(self, prefilled: ExternalPrefill) -> None:
        self.first_token = prefilled.first_token
        self.logprob = prefilled.logprob
        self.finish_reason = prefilled.finish_reason
        self.num_tokens = prefilled.num_tokens
        self.cached_tokens = prefilled.cached_tokens
        self.compute_seconds = prefilled.compute_seconds
        self.queue_seconds = prefilled.queue_seconds
        self.prompt_logprobs = prefilled.prompt_logprobs
        self.engine_state = prefilled.engine_state
        self.is_fetched = False

    def fetched(self) -> None:
        """Notes that the reader has all of it. See EngineHeldKv."""
        self.is_fetched = True
