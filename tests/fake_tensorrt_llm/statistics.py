"""The stand-in's two queues, of statistics and of KV events: whoever reads one has taken it away."""

import time
from collections.abc import Callable
from typing import Any


class Queues:
    """What has been told and not been read."""

    def __init__(self) -> None:
        self.stats: list[dict[str, Any]] = []
        self._iteration = 0

    def note(self, active: int, waiting: list[int], blocks: int, used: int) -> None:
        """One iteration. `waiting` are the lengths of prompts."""
        self._iteration += 1
        self.stats.append(
            {
                "gpuMemUsage": 76665782272,
                "iter": self._iteration,
                "numActiveRequests": active,
                "numQueuedRequests": len(waiting),
                "kvCacheStats": {"maxNumBlocks": blocks, "usedNumBlocks": used},
                "inflightBatchingStats": {"numQueuedCtxTokens": sum(waiting)},
            }
        )


def taken(told: list[dict[str, Any]], seconds: float, is_down: Callable[[], bool]) -> list[dict[str, Any]]:
    """All that waits, waiting a little for something. In the thread of whoever asks."""
    deadline = time.monotonic() + seconds
    while not told and not is_down() and time.monotonic() < deadline:
        time.sleep(0.005)
    found = told[:]
    del told[: len(found)]
    return found
