"""Bounds on CPU time, as ratios to a loop of this machine, in this run: a bound in seconds fits one kind of machine."""

import struct
import time

# What the loop took on the machine that the bounds were chosen on, at its best.
_REFERENCE_SECONDS = 0.007
_TURNS = 20_000
_RUNS = 3
_FRAME = struct.Struct(">IBI")


def here(seconds: float) -> float:
    """CPU seconds of this machine, as it is now, that stand for so many of the one that the bounds were chosen on."""
    return seconds * min(_loop_seconds() for _ in range(_RUNS)) / _REFERENCE_SECONDS


def _loop_seconds() -> float:
    """A loop of what servers do: packs and unpacks frames, slices bytes, and looks things up."""
    began = time.thread_time()
    seen: dict[int, int] = {}
    for number in range(_TURNS):
        packed = _FRAME.pack(number << 8, 1, number) + b"payload"
        length, kind, stream = _FRAME.unpack_from(packed)
        seen[stream & 255] = seen.get(stream & 255, 0) + len(packed[9:]) + (length >> 8) + kind
    return time.thread_time() - began
