"""The memory of a process, divided into what objects use and what the allocators keep."""

import ctypes
import gc
import sys
from collections import Counter
from dataclasses import dataclass

from runtime.garbage import resident_bytes


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@dataclass(frozen=True, slots=True)
class Heap:
    """A process's memory at one time, in bytes.

    `malloc_used` and `malloc_free` are glibc's: what is in use there, and what it keeps for later. Objects below 512
    bytes are in Python's own allocator, of which `blocks` is the number in use. `types` counts the objects that the
    garbage collector knows.
    """

    resident: int
    malloc_used: int
    malloc_free: int
    blocks: int
    types: Counter[str]

    def growth(self, before: "Heap", requests: int) -> str:
        """In words, what became more since `before`: bytes and blocks a request, and objects by type."""
        each = {
            "malloc's used": self.malloc_used - before.malloc_used,
            "free": self.malloc_free - before.malloc_free,
            "small blocks": self.blocks - before.blocks,
        }
        amounts = ", ".join(f"{name} {count / requests:+.2f}" for name, count in each.items())
        types = ", ".join(f"{name} +{count:,}" for name, count in (self.types - before.types).most_common(6))
        return f"{amounts} a request; {types or 'no more objects'}"


def heap() -> Heap:
    """The memory of this process now."""
    resident = resident_bytes()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Heap(resident, info.uordblks + info.hblkhd, info.fordblks, sys.getallocatedblocks(), types)
