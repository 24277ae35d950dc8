"""A thread that moves blocks in one direction."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from services.engines.pytorch.kv_cache.tiers.host import computing_nothing
from services.engines.pytorch.kv_cache.tiers.jobs import Demotion, Load, Write

Job = TypeVar("Job", Demotion, Write, Load)


class Mover(Generic[Job]):
    """A thread that runs jobs in order, several at once if they are waiting. A job that fails is told so."""

    def __init__(
        self, name: str, device: torch.device, run: Callable[[Sequence[Job]], None], most_at_once: int = 1
    ) -> None:
        self._run: Callable[[Sequence[Job]], None] = run
        self._device = device
        self._most_at_once = most_at_once
        self._jobs: queue.SimpleQueue[Sequence[Job] | None] = queue.SimpleQueue()
        self._next_jobs: deque[Job] = deque()  # taken out of the queue; for the thread only
        self._changed = threading.Condition()
        self._is_ending = False
        # A process whose disk hangs can exit all the same.
        self._thread = threading.Thread(target=self._main, name=f"baton-kv-{name}", daemon=True)

    @property
    def name(self) -> str:
        """The thread's name."""
        return self._thread.name

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds jobs, all at once: each call may wake the thread, which then wants the interpreter."""
        self._jobs.put(jobs)

    def wait(self, jobs: Sequence[Job], seconds: float) -> bool:
        """Waits until all of these are done; False if they are not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: all(job.is_done for job in jobs), seconds)

    def end(self) -> None:
        """Lets the thread end after the jobs that run; those that wait are dropped."""
        self._is_ending = True
        self._jobs.put(None)

    def has_ended(self, seconds: float) -> bool:
        """Waits so long for the thread to end; False if it does not."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        with computing_nothing(self._device):
            jobs = self._next()
            while jobs and not self._is_ending:
                try:
                    self._run(jobs)
                except Exception as error:  # of whatever kind: the thread goes on, and the jobs' owner hears of it
                    for job in jobs:
                        job.failure = job.failure or str(error) or type(error).__name__
                self._note_done(jobs)
                jobs = self._next()
        self._drop(jobs + self._waiting())

    def _next(self) -> list[Job]:
        """Waits for a job, and returns it with those that follow; none at the end."""
        while not self._next_jobs or not self._jobs.empty():
            jobs = self._jobs.get()
            if jobs is None:
                self._is_ending = True
                return []
            self._next_jobs += jobs
        return [self._next_jobs.popleft() for _ in range(min(self._most_at_once, len(self._next_jobs)))]

    def _waiting(self) -> list[Job]:
        """Takes all that still waits."""
        jobs = list(self._next_jobs)
        while not self._jobs.empty():
            jobs += self._jobs.get() or ()
        return jobs

    def _drop(self, jobs: Sequence[Job]) -> None:
        """Fails jobs that are not run any more, for who waits for them."""
        for job in jobs:
            job.failure = "the tier is closed"
        self._note_done(jobs)

    def _note_done(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            for job in jobs:
                job.is_done = True
            self._changed.notify_all()
