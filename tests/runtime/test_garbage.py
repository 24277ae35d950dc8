"""The garbage collector does not stop the event loop to look at what lives."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.clock import ManualClock
from support.cluster.processes import ROOT

from runtime import garbage
from runtime.garbage import FullCollections, collect_rarely, forget_content, resident_bytes


def test_a_million_objects_that_live_are_not_all_looked_at_again() -> None:
    before = gc.get_threshold()
    gc.collect()
    full = gc.get_stats()[2]["collections"]
    collect_rarely()
    try:
        living = [[number] for number in range(2_000_000)]
        assert gc.get_stats()[2]["collections"] == full
        assert len(living) == 2_000_000
    finally:
        gc.set_threshold(*before)


def test_requests_that_come_and_go_never_begin_a_full_collection() -> None:
    before = gc.get_threshold()
    gc.collect()
    full = gc.get_stats()[2]["collections"]
    collect_rarely()
    try:
        for _ in range(2_000):
            assert len([[number] for number in range(6_000)]) == 6_000
        assert gc.get_stats()[2]["collections"] == full
    finally:
        gc.set_threshold(*before)


MEBIBYTE = 2**20


class Process:
    """A process with so much memory, whose collections are counted."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.megabytes = 100
        self.collections = FullCollections(self.clock, lambda: self.megabytes * MEBIBYTE)

    def collects(self, after: float) -> bool:
        """Whether it has collected so many seconds later."""
        self.clock.advance(after)
        before = gc.get_stats()[2]["collections"]
        has_collected = any(self.collections.look() for _ in range(garbage._LASTING_LOOKS))
        assert not has_collected or gc.get_stats()[2]["collections"] > before
        return has_collected


@contextmanager
def slow_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with so many objects that a collection takes longer than it may."""
    with monkeypatch.context() as patch:
        patch.setattr(garbage, "_PAUSE_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """What the other tests have left would make each collection slow."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_memory_that_has_grown_is_collected() -> None:
    process = Process()
    assert not process.collects(after=11)
    process.megabytes += 33
    assert process.collects(after=1)
    assert not process.collects(after=11)


def test_memory_that_is_needed_for_a_moment_is_not_growth() -> None:
    process = Process()
    assert not process.collects(after=11)
    for _ in range(5):
        process.megabytes += 300
        assert not process.collections.look()
        process.megabytes -= 300
        assert not process.collections.look()


def test_memory_that_grows_on_is_not_collected_all_the_time() -> None:
    process = Process()
    for _ in range(3):
        process.megabytes += 100
        assert not process.collects(after=9)
        assert process.collects(after=2)


def test_growth_counts_from_the_least_since_the_last_collection() -> None:
    process = Process()
    process.megabytes -= 60
    assert not process.collects(after=11)
    process.megabytes += 33
    assert process.collects(after=1)


def test_what_has_not_grown_is_collected_once_a_minute() -> None:
    process = Process()
    assert not process.collects(after=59)
    assert process.collects(after=2)
    assert not process.collects(after=59)


def test_a_collection_that_would_stop_the_loop_waits_until_memory_has_grown_by_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process()
    with slow_collections(monkeypatch):
        process.megabytes += 33
        assert not process.collects(after=61)
        process.megabytes += 256
        assert process.collects(after=11) or process.collects(after=11)


# What two threads keep of large messages, one after the other, once these are freed.
LARGE_MESSAGES = """
import sys, threading
from runtime.garbage import resident_bytes, return_large_memory

def copy():
    for _ in range(4):
        b"".join([bytes(b"x" * (24 << 20))])

if sys.argv[1] == "True":
    return_large_memory()
before = resident_bytes()
for _ in range(4):
    threads = [threading.Thread(target=copy) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_a_process_that_returns_large_memory_keeps_none_of_what_threads_have_read() -> None:
    command = [sys.executable, "-c", LARGE_MESSAGES]
    kept = {
        returns: int(subprocess.run([*command, str(returns)], capture_output=True, check=True, cwd=ROOT).stdout)
        for returns in (False, True)
    }
    assert kept[True] < 4 * MEBIBYTE < kept[False]


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_the_memory_of_a_buffer_is_given_back_before_the_buffer_is_dropped() -> None:
    content = bytearray(b"x" * 64) * MEBIBYTE
    del content[:5]  # as of a message, which begins after its length
    before = resident_bytes()
    forget_content(content)
    assert before - resident_bytes() > 60 * MEBIBYTE
    assert len(content) == 64 * MEBIBYTE - 5


def test_a_small_buffer_stays_as_it_is() -> None:
    content = bytearray(b"x" * 1000)
    forget_content(content)
    assert content == b"x" * 1000
