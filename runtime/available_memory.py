"""The memory that this process may still take."""

import os
from pathlib import Path

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
