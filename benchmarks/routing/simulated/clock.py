"""Simulated time, and what the cluster's work takes."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass


class Time:
    """The clock and its planned calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (self.now + seconds, next(self._numbers), call))

    def run(self) -> None:
        """Makes all calls in their order, until none is left."""
        while self._planned:
            self.now, _, call = heapq.heappop(self._planned)
            call()


@dataclass(frozen=True)
class StepCosts:
    """The durations of the cluster's work."""

    tokens_per_second: float
    block_tokens: int
    num_blocks: int  # of each worker's cache
    chunk_blocks: int = 16  # of one prefill step
    step_seconds: float = 0.02  # of decoding, for one token of every stream
    hop_seconds: float = 0.002
    move_seconds: float = 0.003
    bytes_per_second: float = 2e9
    block_bytes: int = 64
    load_interval_seconds: float = 0.1
    kv_events: bool = True
