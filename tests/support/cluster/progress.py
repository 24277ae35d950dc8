"""The progress of a starting process: it may take long on a busy machine, but a hung one uses no CPU time."""

import time

import psutil

STALLED_SECONDS = 60.0
# After that it counts as stalled, whatever it does.
LONGEST_SECONDS = 240.0

# The share of time for which a process that makes progress uses the CPU; one that only waits uses far less.
_SHARE = 0.01


class Progress:
    """Follows the CPU time of a process and of those that it has started: a keeper's worker is its child."""

    def __init__(
        self, pid: int, stalled_seconds: float = STALLED_SECONDS, longest_seconds: float = LONGEST_SECONDS
    ) -> None:
        self._process = psutil.Process(pid)
        self._stalled_seconds = stalled_seconds
        self._ends_at = time.monotonic() + longest_seconds
        self._noted = 0.0
        self._note()

    def has_stalled(self) -> bool:
        """True if it has used almost no CPU for `stalled_seconds`, or has taken `longest_seconds` in all."""
        if self._used() - self._noted >= _SHARE * self._stalled_seconds:
            self._note()
        now = time.monotonic()
        return now - self._noted_at > self._stalled_seconds or now > self._ends_at

    def _note(self) -> None:
        self._noted, self._noted_at = self._used(), time.monotonic()

    def _used(self) -> float:
        """Seconds of CPU time so far, also of children that have ended; as before, once it has ended."""
        try:
            return sum(_seconds(one) for one in (self._process, *self._process.children(recursive=True)))
        except psutil.Error:
            return self._noted


def _seconds(process: psutil.Process) -> float:
    """The CPU time of a process and its reaped children; 0 of one that has ended since it was found."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.Error:
        return 0.0
