"""Reading a large body leaves the interpreter to other threads."""

import threading
import time

import pytest

from router.openai.json_body import parse

HOLDING = {
    "escapes": b'{"prompt": "' + rb"\n" * 8 * 2**20 + b'"}',
    "structure in a string": b'{"prompt": "' + rb"\",[" * 4 * 2**20 + b'"}',
    "pairs": b'{"prompt": "' + rb"\ud83d\ude00" * 2**20 + b'"}',
}


@pytest.mark.parametrize("name", HOLDING)
def test_other_threads_run_while_a_large_body_is_read(name: str) -> None:
    longest, ended = 0.0, threading.Event()

    def other() -> None:
        nonlocal longest
        while not ended.is_set():
            before = time.perf_counter()
            time.sleep(0.0005)
            longest = max(longest, time.perf_counter() - before)

    def share() -> float:
        nonlocal longest
        ended.clear()
        thread = threading.Thread(target=other)
        thread.start()
        longest, before = 0.0, time.perf_counter()
        try:
            parse(HOLDING[name])
            return longest / (time.perf_counter() - before)
        finally:
            ended.set()
            thread.join()

    # A busy machine may stop the other thread, but not at each of several tries.
    assert min(share() for _ in range(5)) < 0.25
