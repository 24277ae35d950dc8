"""A thread that takes jobs from a queue and computes all that wait together: what encoder and embedder share."""

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import structlog
import torch
from typing_extensions import Self

from baton.errors import BatonError, EngineFailed
from services.engines.base import EncoderLoad
from services.engines.pytorch.failures import StallDetector, failure_of, is_out_of_memory, too_large
from services.engines.pytorch.model.loading import use_device

_log = structlog.get_logger(__name__)

Outcome = TypeVar("Outcome")


@dataclass(eq=False, slots=True)
class BatchJob(Generic[Outcome]):
    """Work of a size, for the thread. Cancelling `result` drops it, if it has not begun. A test is no client's work."""

    result: "asyncio.Future[Outcome]"
    size: int = field(default=1, kw_only=True)
    is_test: bool = field(default=False, kw_only=True)
    began: bool = field(default=False, init=False)


AnyJob = TypeVar("AnyJob", bound=BatchJob[Any])


class BatchLoop(ABC, Generic[AnyJob]):
    """Computes on a thread while the context is open. `name` is that of what computes, as errors say it.

    Once jobs of the size `most_at_once` or more are together, it takes no further one.

    `healthy` becomes false when the thread ends: then every waiting and later job fails. It is also false while the
    thread hangs; only the end of the process helps then.
    """

    def __init__(self, name: str, stall_detector: StallDetector, most_at_once: int, device: torch.device) -> None:
        self._name = name
        self._stall_detector = stall_detector
        self._most_at_once = most_at_once
        self._device = device
        self._queue: queue.SimpleQueue[AnyJob | None] = queue.SimpleQueue()
        self._unfinished: set[AnyJob] = set()
        self._failure: BatonError | None = None
        self._thread = threading.Thread(target=self._main, name=f"baton-{name}", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def healthy(self) -> bool:
        """True if the thread runs and does not hang."""
        return self._failure is None and not self._stall_detector.is_stuck

    @property
    def load(self) -> EncoderLoad:
        """The jobs being computed, and those that wait."""
        began = [job.began for job in self._unfinished if not job.is_test]
        return EncoderLoad(sum(began), len(began) - sum(began))

    @property
    def quiet_seconds(self) -> float:
        """The time since the thread's last progress."""
        return self._stall_detector.quiet_seconds

    async def test(self) -> None:
        """Computes something small. Raises EngineFailed."""
        raise NotImplementedError

    async def _test(self, job: AnyJob) -> None:
        """Waits for a job that is a test. Raises EngineFailed."""
        self._check_failure()
        self._enqueue([job])
        try:
            await job.result
        finally:
            job.result.cancel()

    @abstractmethod
    def _compute(self, jobs: Sequence[AnyJob]) -> None:
        """Computes, on the thread, and calls `_post` for each job. Raises RuntimeError if nothing can be computed."""

    def _check_failure(self) -> None:
        """Raises the error that ended the thread, if it has ended."""
        if self._failure is not None:
            raise self._failure

    def _enqueue(self, jobs: Sequence[AnyJob]) -> None:
        for job in jobs:
            self._unfinished.add(job)
            job.result.add_done_callback(partial(self._forget, job))
            self._queue.put(job)

    def _forget(self, job: AnyJob, _: object) -> None:
        self._unfinished.discard(job)

    def _post(self, job: AnyJob, outcome: object) -> None:
        """Gives a job its outcome, a BatonError if it failed, from the thread."""
        self._loop.call_soon_threadsafe(_set_outcome, job, outcome)

    def _main(self) -> None:
        failure: BatonError = EngineFailed(f"the {self._name}'s thread has ended")
        try:
            use_device(self._device)
            with torch.inference_mode():
                while jobs := self._next_jobs():
                    with self._stall_detector.beating():
                        self._compute_what_fits([job for job in jobs if not job.result.cancelled()])
            failure = EngineFailed(f"the {self._name} has been closed")
        except RuntimeError as error:  # PyTorch raises it for almost every failure
            _log.error(f"{self._name} failed", error=str(error), exc_info=True)
            failure = failure_of(self._name, error)
        finally:
            self._loop.call_soon_threadsafe(self._end, failure)

    def _compute_what_fits(self, jobs: list[AnyJob]) -> None:
        """Computes; if memory runs out, fails the largest job, and computes the others again."""
        while jobs:
            try:
                self._compute(jobs)
                return
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            largest = max(jobs, key=lambda job: job.size)
            jobs.remove(largest)
            self._post(largest, too_large())

    def _next_jobs(self) -> list[AnyJob]:
        """Returns the waiting jobs, at least one; none if the thread has to end."""
        jobs: list[AnyJob] = []
        while not jobs or (sum(job.size for job in jobs) < self._most_at_once and not self._queue.empty()):
            job = self._queue.get()
            if job is None:
                return []
            jobs.append(job)
        return jobs

    def _end(self, failure: BatonError) -> None:
        self._failure = failure
        for job in tuple(self._unfinished):
            _set_outcome(job, failure)


def _set_outcome(job: BatchJob[Any], outcome: object) -> None:
    if job.result.done():
        return
    if isinstance(outcome, BatonError):
        job.result.set_exception(outcome)
    else:
        job.result.set_result(outcome)
