"""Garbage collection that does not stop the event loop for long.

A full collection looks at every object of the process: 60 ms in an idle router, 260 ms in a worker with PyTorch
(2 cores, Python 3.11), while no stream gets a token. Nearly all of these objects live as long as the process.
"""

import asyncio
import ctypes
import gc
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from runtime.clock import monotonic, perf_counter

# So many objects more than at the last collection begin one of the youngest; by default 700, which a few requests make.
_YOUNG_OBJECTS: Final = 5_000
# After so many of the youngest what they left is collected, too: no more of it than a few milliseconds can look at.
_YOUNG_COLLECTIONS: Final = 2
# After so many of those everything is: never. It takes a router 30 to 80 ms with 1,024 running streams, a second with
# 2,000 requests of 200 texts, and frees nothing. FullCollections knows how long it would take.
_MIDDLE_COLLECTIONS: Final = 2**30
# Everything is collected, too, when memory has grown by so much since the last time, and after so long.
_GROWN_BYTES: Final = 32 * 2**20
_LONGEST_SECONDS: Final = 60.0
# But at most so often, and, until memory has grown by much more, only while it does not stop the loop for longer.
_LEAST_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.005
_MUCH_GROWN_BYTES: Final = 256 * 2**20
_LOOK_SECONDS: Final = 1.0
_LASTING_LOOKS: Final = 4  # in which memory must have grown
# Of a collection, for each object that it looks at; measured by the collections.
_OBJECT_SECONDS: Final = 1e-7
_STATM: Final = "/proc/self/statm"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Options of mallopt, and what is large: not what streams of tokens send.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 2**20
_MADV_DONTNEED: Final = 4  # of Linux


def exempt_living_objects() -> None:
    """Collects once, then exempts the objects that are left from all later collections.

    Call it when the imports are done, also late ones, and again when a model is loaded. Reference counting still frees
    these objects.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Begins a collection after more objects than by default, and looks at few of them, and never at all by itself.

    A request leaves no cycles, however it ends, and its objects live for milliseconds: each of the many collections
    during a burst of requests would only look at what lives. So would full ones while streams run, whose objects live
    for seconds. What a library or a mistake leaves is found by `collected_as_memory_grows`, which goes with it.
    """
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _MIDDLE_COLLECTIONS)


@asynccontextmanager
async def collected_as_memory_grows() -> AsyncIterator[None]:
    """Collects everything, now and then, while the context is open: so what is left in cycles cannot pile up."""

    async def collect() -> None:
        collections = FullCollections()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            collections.look()

    task = asyncio.create_task(collect())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


class FullCollections:
    """Decides when everything is collected. `memory` returns how much the process has, in bytes."""

    def __init__(self, clock: Callable[[], float] = monotonic, memory: "Callable[[], int] | None" = None) -> None:
        self._clock = clock
        self._memory = memory or resident_bytes
        self._recent: deque[int] = deque(maxlen=_LASTING_LOOKS)
        self._left = self._memory()  # the least since the last collection
        self._collected_at = self._tried_at = clock()
        self._object_seconds = _OBJECT_SECONDS

    def look(self) -> bool:
        """Collects if it is time to. Returns whether it was."""
        now = self._clock()
        self._recent.append(self._memory())
        self._left = min(self._left, self._recent[-1])
        # What a large message takes while it is read is not there any more at the next looks.
        has_lasted = len(self._recent) == _LASTING_LOOKS
        grown = min(self._recent) - self._left if has_lasted else 0
        is_due = grown >= _GROWN_BYTES or now - self._collected_at >= _LONGEST_SECONDS
        if not is_due or now - self._tried_at < _LEAST_SECONDS:
            return False
        self._tried_at = now
        objects = len(gc.get_objects())
        if objects * self._object_seconds > _PAUSE_SECONDS and grown < _MUCH_GROWN_BYTES:
            return False
        began = perf_counter()
        gc.collect()
        if objects > 10_000:  # fewer tell nothing of the time for each
            self._object_seconds = (perf_counter() - began) / objects
        self._collected_at, self._left = now, self._memory()
        return True


def return_large_memory() -> None:
    """Has glibc give the memory of large messages back as soon as it is free.

    Otherwise it keeps up to 64 MiB of it for each thread that has read or written one. Not for processes that compute
    with large arrays, which would get them from the system each time.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)


def forget_content(content: bytearray) -> None:
    """Gives the memory of a large buffer back that is not read again. For threads: the event loop runs meanwhile.

    Dropping the buffer later then takes no time. Otherwise that is 4 to 10 ms for 64 MiB, and everything waits.
    """
    if len(content) < _LARGE_BYTES or sys.platform != "linux":
        return
    first = ctypes.addressof(ctypes.c_char.from_buffer(content))
    start, end = -(-first // _PAGE_BYTES) * _PAGE_BYTES, (first + len(content)) // _PAGE_BYTES * _PAGE_BYTES
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def resident_bytes() -> int:
    """The memory of this process; 0 where the system does not tell."""
    try:
        # Without a file object, which would take 150 us each second.
        file = os.open(_STATM, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[1]) * _PAGE_BYTES
    finally:
        os.close(file)
