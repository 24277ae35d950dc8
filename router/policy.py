"""Which worker a request goes to: filter, score and pick, three pure functions."""

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from discovery.registry import WorkerRecord

# A worker that takes so many times as long from token to token as the others is slow. Batches make smaller differences.
_SLOW = 3.0
# Nobody feels less, and it is mostly chance.
_QUICK_SECONDS = 0.005


class Candidate(Protocol):
    """What the policy knows of a worker."""

    @property
    def record(self) -> WorkerRecord: ...

    @property
    def problem(self) -> str:
        """Why nothing should be sent to it now; empty if it is ready."""

    @property
    def embedding_layout(self) -> str:
        """Of the embeddings that it makes or reads; empty if it does not say."""

    @property
    def encoder(self) -> str:
        """The fingerprint of what makes its embeddings; empty if it does not say."""

    @property
    def requests(self) -> int:
        """Requests that it runs or that wait for it, as far as can be known here."""

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait for it, as far as can be known here."""

    @property
    def token_seconds(self) -> float | None:
        """From token to token, of late; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a worker must have. Empty texts and sets ask for nothing."""

    role: str
    model: str
    context_tokens: int
    layout_digest: str = ""
    embedding_layout: str = ""
    encoder: str = ""
    is_dedicated: bool = False  # to this role alone
    tried: frozenset[str] = frozenset()  # processes that have failed this request; WorkerRecord.process


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A worker that cannot be taken, and why."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Filtered:
    """The workers that could be taken, as positions in what was filtered, and the others."""

    able: tuple[int, ...]
    left_out: tuple[LeftOut, ...]

    def reasons(self) -> str:
        """Why each one was left out, in words."""
        return "; ".join(f"{one.worker_id}: {one.reason}" for one in self.left_out) or "none is registered"


@dataclass(frozen=True, slots=True)
class Wish:
    """What makes one able worker better than another. `slack` is how much busier a session's own worker may be."""

    prompt_tokens: int
    session_key: str = ""
    slack: float = 0.0
    turn: int = 0  # differs from request to request, so that equals take turns


def filter(workers: Sequence[Candidate], need: Need) -> Filtered:
    """Separates workers that can do it from those that cannot."""
    reasons = [_reason_against(worker, need) for worker in workers]
    return Filtered(
        tuple(index for index, reason in enumerate(reasons) if not reason),
        tuple(
            LeftOut(worker.record.worker_id, reason) for worker, reason in zip(workers, reasons, strict=True) if reason
        ),
    )


def slowness(workers: Sequence[Candidate]) -> list[float]:
    """How many times as long as the usual one among them each worker takes from token to token; 1 unless it is slow."""
    known = [seconds for worker in workers if (seconds := worker.token_seconds) is not None]
    if len(known) < 2:
        return [1.0] * len(workers)
    usual = max(statistics.median_low(known), _QUICK_SECONDS)
    ratios = [(worker.token_seconds or 0.0) / usual for worker in workers]
    return [ratio if ratio >= _SLOW else 1.0 for ratio in ratios]


def score(worker: Candidate, wish: Wish, slowness: float = 1.0) -> float:
    """How long a request would wait there, in requests; less is better.

    Prompt tokens that wait count as requests of this prompt's length: that many must be computed before it. Where
    everything takes longer, the request itself counts too.
    """
    before = worker.requests + worker.waiting_tokens / max(1, wish.prompt_tokens)
    return before if slowness == 1.0 else (before + 1) * slowness


def pick(workers: Sequence[Candidate], wish: Wish) -> int:
    """The position of the worker to take: a session's own unless it is slow or too busy, else the best, by turns."""
    slow = slowness(workers)
    scores = [score(worker, wish, times) for worker, times in zip(workers, slow, strict=True)]
    least = min(scores)
    if wish.session_key:
        own = max(range(len(workers)), key=lambda index: _affinity(wish.session_key, workers[index].record.worker_id))
        if slow[own] == 1.0 and scores[own] <= least + wish.slack:
            return own
    equals = [index for index, value in enumerate(scores) if value == least]
    return equals[wish.turn % len(equals)]


def pick_rank(worker_id: str, requests: Sequence[int], wish: Wish) -> int:
    """The data-parallel rank of a worker to take, as `pick` does among workers. `requests` is how busy each one is."""
    least = min(requests)
    if wish.session_key:
        ranks = range(len(requests))
        own = max(ranks, key=lambda rank: _affinity(wish.session_key, f"{worker_id}/{rank}"))
        if requests[own] <= least + wish.slack:
            return own
    equals = [rank for rank, value in enumerate(requests) if value == least]
    return equals[wish.turn % len(equals)]


def _reason_against(worker: Candidate, need: Need) -> str:
    record = worker.record
    if record.model != need.model:
        return f"serves {record.model}"
    if need.role not in record.roles:
        return f"has no {need.role} role"
    if record.draining:
        return "is draining"
    if worker.problem:
        return worker.problem
    if record.process in need.tried:
        return "has failed this request"
    if need.layout_digest and record.layout_digest != need.layout_digest:
        return f"its KV layout {record.layout_digest[:12]} differs from {need.layout_digest[:12]}"
    if record.max_context_tokens < need.context_tokens:
        return f"its context ends at {record.max_context_tokens} tokens"
    return _media_reason_against(worker, need)


def _media_reason_against(worker: Candidate, need: Need) -> str:
    if need.embedding_layout and worker.embedding_layout != need.embedding_layout:
        found = worker.embedding_layout[:12] or "none"
        return f"its embedding layout, {found}, differs from {need.embedding_layout[:12]}"
    if need.encoder and worker.encoder != need.encoder:
        return f"its encoder, {worker.encoder[:12]}, differs from {need.encoder[:12]}"
    if need.is_dedicated and worker.record.roles != (need.role,):
        others = " and ".join(role for role in worker.record.roles if role != need.role)
        return f"has the {need.role} role beside {others} only, which the configuration does not allow"
    return ""


def _affinity(session_key: str, worker_id: str) -> bytes:
    """Highest for one worker per key; when a worker goes, only its own sessions move (rendezvous hashing)."""
    return hashlib.blake2b(f"{session_key}\0{worker_id}".encode(), digest_size=8).digest()
