"""How long one change holds the index of KV blocks."""

import random
import time

from support.calibration import here

from router.routing.prefix.kv_index import KvIndex


def test_no_change_takes_long_however_many_blocks_there_are() -> None:
    source = random.Random(4)
    index = KvIndex[int]()
    longest = 0.0
    for message in range(300):
        keys = [source.getrandbits(64) for _ in range(1024)]
        started = time.thread_time()
        index.store(message % 64, keys)
        longest = max(longest, time.thread_time() - started)
    started = time.thread_time()
    index.clear(0)
    assert time.thread_time() - started < here(0.005)
    assert longest < here(0.02)
