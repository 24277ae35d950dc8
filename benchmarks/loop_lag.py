"""The lag of an event loop that wakes a task: in a router under load, and in a loop with as much to do, to compare."""

import asyncio
import time
from multiprocessing.connection import Connection

from benchmarks.processes import run_like_real

_INTERVAL_SECONDS = 0.005
# What a router has to do for 2,000 tokens a second: a step of all streams, thirty times a second.
_STEP_SECONDS, _BUSY_SECONDS = 1 / 30, 0.001


class LagProbe:
    """Measures the lag of the running loop, two hundred times a second, from `start` to `stop`."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to measure."""
        self._seconds = []
        self._due = time.perf_counter() + _INTERVAL_SECONDS
        self._task = asyncio.create_task(self._measure())

    def stop(self) -> tuple[float, float]:
        """Ends it. Returns the median and the 99th percentile, in seconds."""
        assert self._task
        self._task.cancel()
        # One that is late and has not come yet is as late as it is now: a loop that is held has no other.
        late = time.perf_counter() - self._due
        if late > 0 or not self._seconds:
            self._seconds.append(max(0.0, late))
        ordered = sorted(self._seconds)
        return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]

    async def _measure(self) -> None:
        while True:
            self._due = time.perf_counter() + _INTERVAL_SECONDS
            await asyncio.sleep(_INTERVAL_SECONDS)
            self._seconds.append(time.perf_counter() - self._due)


def run_calibrating_loop(pipe: Connection) -> None:
    """A loop in a process, busy for a millisecond thirty times a second. "start" and "measured" measure its lag."""

    async def work() -> None:
        while True:
            await asyncio.sleep(_STEP_SECONDS)
            ends = time.thread_time() + _BUSY_SECONDS
            while time.thread_time() < ends:
                pass

    async def serve() -> None:
        probe, working = LagProbe(), asyncio.create_task(work())
        while (command := await asyncio.to_thread(pipe.recv)) != "stop":
            if command == "start":
                probe.start()
            else:
                pipe.send(probe.stop())
        working.cancel()

    run_like_real(serve)
