"""The times of the engines' steps: they append the times to a file, and the client compares its arrivals with them.

Both clocks are CLOCK_MONOTONIC, which all processes of a machine share.
"""

import os
import struct
import time
from pathlib import Path

import numpy

from benchmarks.peers.clients.load import Seconds

_TIME = struct.Struct("=d")


class StepLog:
    """The file in which an engine records its steps."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self) -> None:
        """The tokens of a step exist now, and nothing has been done with them yet."""
        os.write(self._file, _TIME.pack(time.perf_counter()))


def since_steps(path: Path, arrivals: Seconds) -> Seconds:
    """The time between each of these steps and the one before. More than a step cannot be told from less."""
    steps = numpy.fromfile(path)
    before = numpy.searchsorted(steps, arrivals, side="right") - 1
    known = before >= 0
    found: Seconds = arrivals[known] - steps[before[known]]
    return found
