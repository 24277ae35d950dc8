"""KV that TensorRT-LLM holds for others, by our own book: it tells nobody, and gives it back in two ways only.

Either the other side fetches it, or the transfer times out. An abort after the prompt has been computed does nothing.
"""

import asyncio
import math
import time
from dataclasses import dataclass

from services.answer import FinishReason, TokenLogprob

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Pin:
    tokens: int
    since: float
    timer: asyncio.TimerHandle


class Pinned:
    """What is held, in blocks and tokens."""

    def __init__(self, timeout_seconds: float, block_tokens: int) -> None:
        self._timeout_seconds = timeout_seconds
        self._block_tokens = block_tokens
        self._held: dict[object, _Pin] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        return sum(pin.tokens for pin in self._held.values())

    @property
    def blocks(self) -> int:
        return sum(-(-pin.tokens // self._block_tokens) for pin in self._held.values())

    @property
    def oldest_seconds(self) -> float:
        """For how long the oldest has been held; 0 if nothing is."""
        return max((time.monotonic() - pin.since for pin in self._held.values()), default=0.0)

    @property
    def youngest_seconds(self) -> float:
        """For how long nothing has been added; without end if nothing is held."""
        return min((time.monotonic() - pin.since for pin in self._held.values()), default=math.inf)

    def pin(self, key: object, tokens: int) -> None:
        """Counts it until `unpin`, or until the engine's own timeout has freed it."""
        timer = asyncio.get_running_loop().call_later(self._timeout_seconds, self.unpin, key)
        self._held[key] = _Pin(tokens, time.monotonic(), timer)

    def unpin(self, key: object) -> int:
        """It was fetched; returns how many blocks that gives back, 0 if they were back already."""
        pin = self._held.pop(key, None)
        if pin is None:
            return 0
        pin.timer.cancel()
        return -(-pin.tokens // self._block_tokens)

    async def outlived(self, seconds: float) -> None:
        """Waits until nothing is held, or nobody can be reading it any more: `seconds` after the last one came."""
        while len(self) and self.youngest_seconds < seconds:  # noqa: ASYNC110 - it is time that is waited for
            await asyncio.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Stops the clocks."""
        for key in list(self._held):
            self.unpin(key)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What became of a prompt. `state` is empty where the first token ended it."""

    first_token: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    num_tokens: int
    cached_tokens: int
    compute_seconds: float
    state: bytes


class TrtllmKv:
    """A MovingKv. `release` gives nothing back unless the other side has fetched it: the timeout does."""

    block_ids: tuple[int, ...] = ()
    prefix_hash = b""
    queue_seconds = 0.0

    def __init__(self, prefilled: Prefilled, pinned: Pinned) -> None:
        self._prefilled = prefilled
        self._pinned = pinned
        self._is_fetched = False

    @property
    def first_token(self) -> int:
        return self._prefilled.first_token

    @property
    def logprob(self) -> TokenLogprob | None:
        return self._prefilled.logprob

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._prefilled.finish_reason

    @property
    def num_tokens(self) -> int:
        return self._prefilled.num_tokens

    @property
    def cached_tokens(self) -> int:
        return self._prefilled.cached_tokens

    @property
    def compute_seconds(self) -> float:
        return self._prefilled.compute_seconds

    @property
    def engine_state(self) -> bytes:
        return self._prefilled.state

    def fetched(self) -> None:
        """The other side has it."""
        self._is_fetched = True

    async def release(self) -> int:
        """Gives back what was fetched; returns how many blocks that was, 0 if it waits for the timeout."""
        return self._pinned.unpin(self._prefilled) if self._is_fetched else 0
