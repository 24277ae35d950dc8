"""The stand-in's two queues, of statistics and of KV events. A read takes what it returns out of them."""

import time
from collections.abc import Callable
from typing import Any


class Queues:
    """The statistics that were not read yet, one row for each iteration and rank."""

    def __init__(self, ranks: int) -> None:
        self.stats: list[dict[str, Any]] = []
        self._ranks = ranks
        self.iteration = 0

    def note(self, active: int, waiting: list[int], blocks: int, used: int) -> None:
        """Adds one iteration. `waiting` has the lengths of prompts; only the first rank reports its queue."""
        self.iteration += 1
        for rank in range(self._ranks):
            queued = waiting if rank == 0 else []
            self.stats.append(
                {
                    "gpuMemUsage": 76665782272,
                    "iter": self.iteration,
                    "attentionDpRank": rank,
                    "numActiveRequests": active,
                    "numQueuedRequests": len(queued),
                    "kvCacheStats": {"maxNumBlocks": blocks, "usedNumBlocks": used},
                    "inflightBatchingStats": {"numQueuedCtxTokens": sum(queued)},
                }
            )


class IterationResult:
    """A queue as 1.2 reads it: until it has been empty for a timeout, then nothing until the next submission."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        self._told = told
        self._done = False

    def mark_undone(self) -> None:
        """A request was submitted."""
        self._done = False

    def get_results(self, seconds: float, is_down: Callable[[], bool]) -> list[dict[str, Any]]:
        """Everything up to a pause of `seconds`."""
        results: list[dict[str, Any]] = []
        while not self._done:
            deadline = time.monotonic() + seconds
            while not self._told and not is_down() and time.monotonic() < deadline:
                time.sleep(0.0002)
            if not self._told:
                self._done = True
                break
            results.append(self._told.pop(0))
        return results


class Executor:
    """The part of an engine's executor that 1.2 keeps its two readers in."""

    def __init__(self) -> None:
        self._iter_stats_result: IterationResult | None = None
        self._iter_kv_events_result: IterationResult | None = None

    def expect_more(self, stats: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        """A request was submitted."""
        if self._iter_stats_result is None or self._iter_kv_events_result is None:
            self._iter_stats_result, self._iter_kv_events_result = IterationResult(stats), IterationResult(events)
        self._iter_stats_result.mark_undone()
        self._iter_kv_events_result.mark_undone()


def taken(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A queue as later versions read it: all that is there, at once."""
    found = told[:]
    del told[: len(found)]
    return found
