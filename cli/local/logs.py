"""Reads the logs of a local cluster from the end."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

POLL_SECONDS = 0.2


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines; empty if the file does not exist."""
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except FileNotFoundError:
        return []


async def follow(paths: Mapping[str, Path], sizes: Mapping[str, int]) -> AsyncGenerator[tuple[str, str], None]:
    """Yields (name, line) for every line after the first `sizes` bytes, forever. Starts over if a log is truncated."""
    read = dict(sizes)
    while True:
        for name, path in paths.items():
            for line in _complete_lines(path, read[name]):
                read[name] += len(line)
                yield name, line.decode(errors="replace").rstrip("\n")
            if _size(path) < read[name]:
                read[name] = 0
        await asyncio.sleep(POLL_SECONDS)


def _complete_lines(path: Path, start: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return [line for line in file if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
