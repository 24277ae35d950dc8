"""The adapter's metrics, and vLLM's own, `vllm:*`, at the same endpoint."""

import time
from dataclasses import dataclass
from typing import Any

from runtime.telemetry.metrics import counter, gauge

HANDOFFS = gauge("baton_vllm_handoffs_held", "Prompts whose KV vLLM holds for readers.")
EXPIRED = counter("baton_vllm_handoffs_expired_total", "Handoffs whose KV vLLM freed before they were confirmed.")
EARLY_RELEASES = counter("baton_vllm_early_releases_total", "Handoffs whose KV was freed before vLLM's own deadline.")
ABORTS = counter("baton_vllm_aborts_total", "Requests that were aborted inside vLLM.")
UNANSWERED_ABORTS = counter(
    "baton_vllm_unanswered_aborts_total", "Aborts that vLLM did not handle within abort_seconds."
)
STALLED_READERS = counter("baton_vllm_stalled_readers_total", "Requests aborted because their answer was not read.")
DIVERGED = counter(
    "baton_vllm_answers_diverged_total",
    "Sampled answers that were continued, and whose first tokens did not come again.",
)
KV_EVENT_GAPS = counter("baton_vllm_kv_event_gaps_total", "Times that KV events were lost.")

_FRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The counts of one rank's latest step. `usage` is the used part of its blocks, cached ones not counted."""

    running: int
    waiting: int
    usage: float
    at: float


class VllmStatistics:
    """The latest counts of every rank."""

    def __init__(self) -> None:
        self._latest: dict[int, StepCounts] = {}

    def record(self, rank: int, stats: Any) -> None:
        """Keeps a step's SchedulerStats; a number that a version lacks is 0."""
        self._latest[rank] = StepCounts(
            running=int(getattr(stats, "num_running_reqs", 0)),
            waiting=int(getattr(stats, "num_waiting_reqs", 0)) + int(getattr(stats, "num_skipped_waiting_reqs", 0)),
            usage=float(getattr(stats, "kv_cache_usage", 0.0)),
            at=time.monotonic(),
        )

    @property
    def usage(self) -> float:
        """The used part of the pools of all ranks, as of their latest steps."""
        return sum(each.usage for each in self._latest.values()) / max(1, len(self._latest))

    @property
    def waiting(self) -> int:
        """Requests in no batch, of all ranks that have made a step lately."""
        oldest = time.monotonic() - _FRESH_SECONDS
        return sum(each.waiting for each in self._latest.values() if each.at >= oldest)
