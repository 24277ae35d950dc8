"""What TensorRT-LLM says of its iterations; an idle engine says nothing, and is well."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of one attention-DP rank."""

    rank: int
    number: int
    waiting: int
    waiting_tokens: int
    blocks_total: int
    read_at: float = field(default_factory=time.monotonic)


def read_iteration(stat: Mapping[str, Any]) -> Iteration:
    """What is not there is 0: versions differ in what they report."""
    batching = stat.get("inflightBatchingStats") or {}
    cache = stat.get("kvCacheStats") or {}
    return Iteration(
        rank=int(stat.get("attentionDpRank") or 0),
        number=int(stat.get("iter") or 0),
        waiting=int(stat.get("numQueuedRequests") or 0),
        waiting_tokens=int(batching.get("numQueuedCtxTokens") or 0),
        blocks_total=int(cache.get("maxNumBlocks") or 0),
    )


class Statistics:
    """The latest iteration of each rank. What is older than `fresh_seconds` tells nothing of who waits now."""

    def __init__(self, fresh_seconds: float = 1.0) -> None:
        self._fresh_seconds = fresh_seconds
        self._latest: dict[int, Iteration] = {}

    def note(self, iteration: Iteration) -> bool:
        """Keeps it; says whether the engine has gone on since the last one."""
        before = self._latest.get(iteration.rank)
        self._latest[iteration.rank] = iteration
        return before is None or iteration.number != before.number

    @property
    def waiting(self) -> int:
        """Requests that are in no batch."""
        return sum(one.waiting for one in self._fresh())

    @property
    def waiting_tokens(self) -> int:
        """Of their prompts."""
        return sum(one.waiting_tokens for one in self._fresh())

    @property
    def blocks_total(self) -> int:
        """Of all ranks; 0 before the first iteration."""
        return sum(one.blocks_total for one in self._latest.values())

    def _fresh(self) -> list[Iteration]:
        now = time.monotonic()
        return [one for one in self._latest.values() if now - one.read_at < self._fresh_seconds]
