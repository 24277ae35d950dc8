"""The time for which a worker could have given a sign of life, and gave none."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

# Of the time in which a thread waited for a processor: one that waits for ever must not hide that others hang.
_LEAST_SHARE = 1 / 60


class Silence:
    """The seconds since a process has last given a sign of life; of a minute of waiting for a processor one second.

    On a busy machine every worker is late; killing one would lose its work and make the machine no faster.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._threads: Mapping[str, _Thread] | None = None
        self.seconds = 0.0

    def end(self) -> None:
        """It has given a sign of life."""
        self._threads, self.seconds = None, 0.0

    def add(self, seconds: float) -> None:
        """So many have passed without one. The first ones only begin the silence."""
        before, self._threads = self._threads, _threads_of(self._pid)
        if before is not None:
            pairs = ((before[name], now) for name, now in self._threads.items() if name in before)
            # Any of its threads may hold what the others need, such as the interpreter's lock.
            waited = max((_waited_seconds(*pair, seconds) for pair in pairs), default=0.0)
            self.seconds += max(_LEAST_SHARE * seconds, seconds - waited)


@dataclass(frozen=True, slots=True)
class _Thread:
    """The nanoseconds that a thread ran, and that it waited for a processor, up to the last time that it got one."""

    ran: int
    waited: int
    can_run: bool


def _waited_seconds(before: _Thread, now: _Thread, longest: float) -> float:
    """The part of the time between the two in which it waited for a processor."""
    is_waiting = now.can_run and (now.ran, now.waited) == (before.ran, before.waited)
    return longest if is_waiting else (now.waited - before.waited) / 1e9


def _threads_of(pid: int) -> Mapping[str, _Thread]:
    """The threads of a process, by their ids; none where the kernel does not count how long they wait."""
    folder = f"/proc/{pid}/task"
    threads = {}
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError, ValueError, IndexError):  # it has just ended
                thread = _thread(f"{folder}/{name}")
                # A kernel that does not count says 0 of a thread that has run, too.
                if thread.ran or thread.waited:
                    threads[name] = thread
    return threads


def _thread(folder: str) -> _Thread:
    ran, waited, _ = _read(f"{folder}/schedstat").split()
    state = _read(f"{folder}/stat").rpartition(")")[2].split()[0]
    return _Thread(int(ran), int(waited), state == "R")


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
