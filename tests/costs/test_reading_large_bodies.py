"""Reading a large body leaves the interpreter to other threads."""

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from baton.errors import InvalidRequest
from media.sources.uri import decode_data
from router.openai.json_body import parse

HOLDING = {
    "escapes": b'{"prompt": "' + rb"\n" * 8 * 2**20 + b'"}',
    "structure in a string": b'{"prompt": "' + rb"\",[" * 4 * 2**20 + b'"}',
    "pairs": b'{"prompt": "' + rb"\ud83d\ude00" * 2**20 + b'"}',
}


def read_without_end() -> None:
    with pytest.raises(InvalidRequest, match="a string has no end"):
        parse(b'{"prompt": "' + b"x" * 15 * 2**20)


READING: dict[str, Callable[[], object]] = {
    **{name: partial(parse, body) for name, body in HOLDING.items()},
    "a string without an end": read_without_end,
    "base64": partial(decode_data, "data:image/png;base64," + "QUJD" * 4 * 2**20, "media[0]", 2**30),
}


@pytest.mark.parametrize("name", READING)
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
            READING[name]()
            return longest / (time.perf_counter() - before)
        finally:
            ended.set()
            thread.join()

    # A busy machine may stop the other thread, but not at each of several tries.
    assert min(share() for _ in range(5)) < 0.25
