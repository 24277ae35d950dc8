"""The garbage collector does not stop the event loop to look at what lives."""

import gc
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterator

import pytest
from support.clock import ManualClock
from support.cluster.processes import ROOT

from runtime import garbage
from runtime.garbage import FullCollections, collect_rarely, forget_content, resident_bytes

MEBIBYTE = 2**20
# Of which a collection takes 6 ms.
FEW_OBJECTS = 60_000


@pytest.fixture
def looked_at() -> Iterator[list[int]]:
    """The most objects that a collection has looked at, while they are as rare as in the project's processes."""

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            counts.append(sum(len(gc.get_objects(generation=each)) for each in range(info["generation"] + 1)))

    counts: list[int] = []
    before = gc.get_threshold()
    gc.collect()
    collect_rarely()
    gc.callbacks.append(count)
    yield counts
    gc.callbacks.remove(count)
    gc.callbacks.remove(garbage._exempt_many)
    gc.set_threshold(*before)


def test_no_collection_looks_at_many_objects_while_a_million_live(looked_at: list[int]) -> None:
    living = [[number] for number in range(1_000_000)]
    assert looked_at
    assert max(looked_at) < FEW_OBJECTS
    assert len(living) == 1_000_000


def test_no_collection_looks_at_many_objects_while_requests_come_and_go(looked_at: list[int]) -> None:
    requests = deque[list[list[int]]](maxlen=50)
    for _ in range(500):
        requests.append([[number] for number in range(6_000)])
    assert looked_at
    assert max(looked_at) < FEW_OBJECTS


def test_cycles_of_a_few_objects_are_found_soon(looked_at: list[int]) -> None:
    found = 0

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            nonlocal found
            found += 1

    living = [[number] for number in range(200_000)]
    for _ in range(100_000):
        Cycle()
    assert found > 80_000
    assert len(living) == 200_000


class Process:
    """A process with so much memory, whose collections are counted, and which is idle unless it is said to be busy."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.megabytes = 100
        self.cpu_share = 0.0
        self.computed = 0.0
        self.collections = FullCollections(self.clock, lambda: self.megabytes * MEBIBYTE, lambda: self.computed)

    def collects(self, after: float) -> bool:
        """True if it has collected so many seconds later."""
        self.passes(after)
        before = gc.get_stats()[2]["collections"]
        has_collected = any(self.looks() for _ in range(garbage._LASTING_LOOKS))
        assert not has_collected or gc.get_stats()[2]["collections"] > before
        return has_collected

    def looks(self) -> bool:
        self.passes(0.1)
        return self.collections.look()

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.computed += seconds * self.cpu_share

    def finds_what_was_exempt(self) -> bool:
        """True if it finds a cycle that was exempt while it was needed, when it collects."""

        class Cycle:
            pass

        cycle = Cycle()
        cycle.itself = cycle  # type: ignore[attr-defined]
        found = weakref.ref(cycle)
        gc.freeze()
        del cycle
        assert self.collects(after=11)
        return found() is None


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Leaves out what the other tests have left, which would make each collection slow."""
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
    assert not process.collects(after=58)
    assert process.collects(after=2)
    assert not process.collects(after=58)


def test_what_was_exempt_is_looked_at_when_a_process_that_has_grown_by_much_is_idle() -> None:
    process = Process()
    process.megabytes += 200
    assert not process.finds_what_was_exempt()
    process.megabytes += 60
    assert process.finds_what_was_exempt()


def test_what_was_exempt_is_not_looked_at_by_a_busy_process_until_memory_has_grown_by_a_gibibyte() -> None:
    process = Process()
    process.cpu_share = 0.5
    for _ in range(3):
        process.megabytes += 300
        assert not process.finds_what_was_exempt()
    process.megabytes += 300
    assert process.finds_what_was_exempt()
    process.megabytes += 300
    assert not process.finds_what_was_exempt()


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
