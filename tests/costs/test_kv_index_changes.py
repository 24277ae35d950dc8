"""The time for which one change holds the index of KV blocks."""

import random
import time

from support.calibration import here

from router.routing.prefix.kv_index import KvIndex


def test_no_change_takes_long_however_many_blocks_there_are() -> None:
    # What a change itself costs, it costs each time.
    stores, clears = zip(*(_longest() for _ in range(3)), strict=True)
    assert min(clears) < here(0.005)
    assert min(stores) < here(0.02)


def _longest() -> tuple[float, float]:
    """CPU seconds of the longest of 300 changes, and of one that removes a worker."""
    source, index, longest = random.Random(4), KvIndex[int](), 0.0
    for message in range(300):
        keys = [source.getrandbits(64) for _ in range(1024)]
        started = time.thread_time()
        index.store(message % 64, keys)
        longest = max(longest, time.thread_time() - started)
    started = time.thread_time()
    index.clear(0)
    return longest, time.thread_time() - started
