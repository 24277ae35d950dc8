"""Scores workers and ranks by their load, and picks one: the session's own, or the least loaded.

Prefers workers that have a request's adapter in memory, while they are not much busier than the others.
"""

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from baton.inference.v1 import lora_pb2
from router.routing.policy import Candidates, W, WorkerView

T = TypeVar("T")

# From this ratio to the median on, a worker's inter-token latency is slow. Batches make smaller differences.
_SLOW = 3.0
# Latencies below this count as equal: the differences are noise.
_QUICK_SECONDS = 0.005
# How many requests busier than one that sleeps a worker may be: to wake takes time, and another model's memory.
_ASLEEP_REQUESTS = 8.0
# How many requests busier than the idlest a session's own rank may be.
_RANK_SLACK = 2.0


@dataclass(frozen=True, slots=True)
class Preferences:
    """The preferences for the choice among eligible workers.

    `slack` is how many requests busier than the least loaded a session's own worker may be. `turn` differs from request
    to request, so that equally loaded workers take turns.
    """

    prompt_tokens: int
    session_key: str = ""
    slack: float = 0.0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Scored(Generic[T]):
    """Something to choose, with its score: less is better. Sessions prefer it by its `key`, unless it is slow."""

    choice: T
    key: str
    score: float
    is_slow: bool = False


def pick(options: Sequence[Scored[T]], preferences: Preferences) -> T:
    """The session's own choice unless it is slow or too busy; otherwise the best, by turns."""
    least = min(option.score for option in options)
    if preferences.session_key:
        own = max(options, key=lambda option: _affinity(preferences.session_key, option.key))
        if not own.is_slow and own.score <= least + preferences.slack:
            return own.choice
    best = [option.choice for option in options if option.score == least]
    return best[preferences.turn % len(best)]


def score_workers(workers: Sequence[W], preferences: Preferences) -> list[Scored[W]]:
    """Each worker with its score."""
    return [
        Scored(worker, worker.record.worker_id, score(worker, preferences, ratio), is_slow=ratio > 1)
        for worker, ratio in zip(workers, slowness(workers), strict=True)
    ]


def score(worker: WorkerView, preferences: Preferences, slowness: float = 1.0) -> float:
    """The wait of a request at a worker, in requests; less is better.

    Queued prompt tokens count as requests with a prompt of the same length, since they are computed first. On a slow
    worker the request itself counts, too.
    """
    before = worker.requests + worker.waiting_tokens / max(1, preferences.prompt_tokens)
    if worker.wake_seconds:
        before += _ASLEEP_REQUESTS
    return before if slowness == 1.0 else (before + 1) * slowness


def slowness(workers: Sequence[WorkerView]) -> list[float]:
    """The ratio of each worker's inter-token latency to the median; 1 for all that are not slow."""
    known = [seconds for worker in workers if (seconds := worker.token_seconds) is not None]
    if len(known) < 2:
        return [1.0] * len(workers)
    usual = max(statistics.median_low(known), _QUICK_SECONDS)
    ratios = [(worker.token_seconds or 0.0) / usual for worker in workers]
    return [ratio if ratio >= _SLOW else 1.0 for ratio in ratios]


class Ranks:
    """Spreads this router's requests over the data-parallel ranks of a worker."""

    def __init__(self, worker_id: str, count: int) -> None:
        self._keys = [f"{worker_id}/{rank}" for rank in range(max(1, count))]
        self._requests = [0] * len(self._keys)
        self._turn = 0

    def begin(self, session_key: str, chosen: int | None = None) -> int | None:
        """A rank for a request, which counts as its load until `end`. None if there is only one.

        `chosen` is the rank that the policy has chosen, if it has.
        """
        if len(self._keys) == 1:
            return None
        rank = self._pick(session_key) if chosen is None else chosen
        self._requests[rank] += 1
        return rank

    def end(self, rank: int) -> None:
        """Notes the end of a request on a rank."""
        self._requests[rank] -= 1

    def _pick(self, session_key: str) -> int:
        self._turn += 1
        preferences = Preferences(prompt_tokens=1, session_key=session_key, slack=_RANK_SLACK, turn=self._turn)
        options = [Scored(rank, key, self._requests[rank]) for rank, key in enumerate(self._keys)]
        return pick(options, preferences)


def _affinity(session_key: str, key: str) -> bytes:
    """Highest for one key per session. When a worker leaves, only its own sessions move (rendezvous hashing)."""
    return hashlib.blake2b(f"{session_key}\0{key}".encode(), digest_size=8).digest()


# How many requests busier a worker that has the adapter may be than the least busy one, which would have to load it.
_SLACK_REQUESTS = 8


def prefer_loaded(candidates: Candidates[W], adapter: lora_pb2.LoraAdapter | None) -> Candidates[W]:
    """Leaves out workers that would have to load the adapter, as long as there are enough others."""
    if adapter is None:
        return candidates
    decode = _loaded(candidates.decode, adapter)
    preferred = replace(candidates, decode=decode, prefill=_loaded(candidates.prefill, adapter))
    if not candidates.prefill:
        return preferred
    # A worker that can hand over is worth more than a loaded adapter.
    paired = [worker for worker in decode if preferred.prefill_for(worker)]
    if paired:
        return replace(preferred, decode=paired) if candidates.requires_prefill else preferred
    paired = [worker for worker in decode if candidates.prefill_for(worker)]
    return replace(candidates, decode=paired) if paired else candidates


def _loaded(workers: Sequence[W], adapter: lora_pb2.LoraAdapter) -> Sequence[W]:
    loaded = [worker for worker in workers if worker.loras.has_loaded(adapter)]
    if not loaded:
        return workers
    least = min(worker.requests for worker in workers)
    return loaded if min(worker.requests for worker in loaded) <= least + _SLACK_REQUESTS else workers
