"""The peak memory of a block of code."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """The growth of this process's peak memory, set at the end of the block."""

    megabytes: float = 0.0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measures the block inside by the kernel's own high-water mark."""
    peak = Peak()
    Path("/proc/self/clear_refs").write_text("5")  # sets the mark to what is in use now
    before = _status("VmRSS")
    yield peak
    peak.megabytes = (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
