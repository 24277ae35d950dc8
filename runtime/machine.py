"""The memory that this process may still take. The GPUs of this machine that a process of ours may use."""

import os
from itertools import takewhile
from pathlib import Path

import pynvml

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """The memory of the machine that is free, or can be freed at once; at most what the limit of a container leaves."""
    return min(_machine(meminfo), _container(cgroup))


def _machine(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container(cgroup: Path) -> int:
    """The memory that the limit of cgroups, version 2, leaves; without one as much as there can be."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        return max(0, limit - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return 2**63


VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """By index or UUID: those that CUDA's variable names, or else all that NVIDIA's driver has; none without a driver.

    What the variable names need not exist.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        # As CUDA does: a name that is none hides all that come after it.
        return tuple(takewhile(bool, (name.strip() for name in chosen.split(","))))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(map(str, range(pynvml.nvmlDeviceGetCount())))
    finally:
        pynvml.nvmlShutdown()
