"""Garbage collection that does not stop the event loop for long.

A full collection looks at every object of the process: 60 ms in an idle router, 260 ms in a worker with PyTorch
(2 cores, Python 3.11), while no stream gets a token. Nearly all of these objects live as long as the process, and many
others as long as a stream.
"""

import asyncio
import ctypes
import gc
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from runtime.aio import sleep_together
from runtime.clock import monotonic, process_time

# So many objects more than at the last collection begin one of the youngest; by default 700, which a few requests make.
_YOUNG_OBJECTS: Final = 5_000
# After so many of the youngest what they left is collected, too: no more of it than a few milliseconds can look at.
_YOUNG_COLLECTIONS: Final = 2
# After so many of those all that has been left since objects were last exempted.
_MIDDLE_COLLECTIONS: Final = 1
# If more than these are left then, they are exempt: a collection of them takes 2 ms.
_MOST_OBJECTS: Final = 20_000
# The same begins when memory has grown by so much since the last time, and after so long, but at most so often.
_GROWN_BYTES: Final = 32 * 2**20
_LONGEST_SECONDS: Final = 60.0
_LEAST_SECONDS: Final = 10.0
# What was exempted is looked at when memory has grown by this and the process is idle, or by more than all that clients
# can have it keep: by `input`, `unread_output_bytes` and the vectors in the making.
_MUCH_GROWN_BYTES: Final = 256 * 2**20
_MOST_GROWN_BYTES: Final = 2**30
_IDLE_SHARE: Final = 0.02  # of a core: health checks of workers take half of it
_LOOK_SECONDS: Final = 1.0
_LASTING_LOOKS: Final = 4  # in which memory must have grown
_STATM: Final = "/proc/self/statm"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Options of mallopt, and what is large: not what streams of tokens send.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 2**20
_MADV_DONTNEED: Final = 4  # of Linux


def exempt_living_objects() -> None:
    """Collects once, then exempts the objects that are left from later collections.

    Call it when the imports are done, also late ones, and again when a model is loaded. Reference counting still frees
    these objects.
    """
    gc.collect()
    gc.freeze()
    # The next collection of everything comes after a share of what the last one has left.
    gc.collect()


@contextmanager
def uncollected() -> Iterator[None]:
    """No thread collects garbage within the context, which does not nest."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_rarely() -> None:
    """Begins a collection after more objects than by default, and has none look at more than some 60,000.

    A request leaves no cycles, however it ends, and its objects live for milliseconds: each of the many collections
    during a burst of requests would only look at what lives. Objects that survive by tens of thousands, as those of a
    thousand streams do, are exempt from then on. What a library or a mistake leaves in cycles among them is found by
    `collected_as_memory_grows`, which goes with it.
    """
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _MIDDLE_COLLECTIONS)
    if _exempt_many not in gc.callbacks:
        gc.callbacks.append(_exempt_many)


def _exempt_many(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2 and len(gc.get_objects(generation=2)) > _MOST_OBJECTS:
        gc.freeze()


@asynccontextmanager
async def collected_as_memory_grows() -> AsyncIterator[None]:
    """Collects, now and then, while the context is open: so what is left in cycles cannot pile up."""

    async def collect() -> None:
        collections = FullCollections()
        while True:
            await sleep_together(_LOOK_SECONDS / 2, _LOOK_SECONDS)
            collections.look()

    task = asyncio.create_task(collect())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


class FullCollections:
    """Decides when what is not exempt is collected, and when everything is.

    `memory` returns how much the process has, in bytes, and `cpu` how long it has computed, in seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        memory: "Callable[[], int] | None" = None,
        cpu: Callable[[], float] = process_time,
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._memory = memory or resident_bytes
        self._recent: deque[int] = deque(maxlen=_LASTING_LOOKS)
        self._left = self._left_of_all = self._memory()  # the least since the last collection
        self._looked_at = self._collected_at = clock()
        self._computed = cpu()

    def look(self) -> bool:
        """Collects if it is time to. Returns whether it was."""
        now, is_idle = self._clock(), self._is_idle()
        self._looked_at = now
        self._recent.append(self._memory())
        self._left, self._left_of_all = min(self._left, self._recent[-1]), min(self._left_of_all, self._recent[-1])
        if now - self._collected_at < _LEAST_SECONDS:
            return False
        # What a large message takes while it is read is not there any more at the next looks.
        lasting = min(self._recent) if len(self._recent) == _LASTING_LOOKS else 0
        if lasting - self._left_of_all >= (_MUCH_GROWN_BYTES if is_idle else _MOST_GROWN_BYTES):
            gc.unfreeze()
            exempt_living_objects()
            self._left_of_all = self._memory()
        elif lasting - self._left >= _GROWN_BYTES or now - self._collected_at >= _LONGEST_SECONDS:
            gc.collect()
        else:
            return False
        self._collected_at, self._left = now, self._memory()
        return True

    def _is_idle(self) -> bool:
        """True if the process has computed next to nothing since the last look."""
        before, self._computed = self._computed, self._cpu()
        return self._computed - before < _IDLE_SHARE * (self._clock() - self._looked_at)


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
