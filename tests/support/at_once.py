"""The number of processes that run tests at once, where it is not given: most tests wait for half of their time."""

import os
from pathlib import Path

from runtime.machine import available_bytes

# A process of tests with PyTorch, and the cluster of processes that one of its tests starts.
_PROCESS_BYTES = 3 << 30
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def processes_at_once(cores: int, memory_bytes: int) -> int:
    """One more than there are cores, as far as the memory that is free goes, and never none."""
    return max(1, min(cores + 1, memory_bytes // _PROCESS_BYTES))


def here() -> int:
    """The number for this machine, or for the container that this process runs in."""
    return processes_at_once(_cores(), available_bytes())


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, _CPU_QUOTA.read_text().split())
        return max(1, min(cores, quota // period))
    except (OSError, ValueError):  # no container, or "max"
        return cores
