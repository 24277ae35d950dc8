"""The embedder's thread: takes calls from a bounded queue, and runs the texts of all that wait together."""

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from typing_extensions import Self

from baton.errors import BatonError, EngineFailed, Overloaded
from services.engines.base import EncoderLoad
from services.engines.embedding import Vector
from services.engines.pytorch.embedding.text_model import TextModel
from services.engines.pytorch.stall_detector import StallDetector

_log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class EmbedJob:
    """The texts of one call. Cancelling `result` drops it, if it has not begun."""

    texts: Sequence[Sequence[int]]
    result: "asyncio.Future[list[Vector]]"
    began: bool = False


@dataclass(frozen=True, slots=True)
class EmbedLimits:
    """The texts taken together, the tokens of one step with its padding, and the calls that may wait."""

    texts: int
    step_tokens: int
    waiting: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A text, and where its vector belongs."""

    text: Sequence[int]
    job: int
    index: int


class EmbedderLoop:
    """Embeds on a thread while the context is open.

    `healthy` becomes false when the thread ends: then every waiting and later call fails. It is also false while the
    thread hangs; only the end of the process helps then.
    """

    def __init__(self, model: TextModel, pulse: StallDetector, limits: EmbedLimits) -> None:
        self._model = model
        self._pulse = pulse
        self._limits = limits
        self._queue: queue.SimpleQueue[EmbedJob | None] = queue.SimpleQueue()
        self._unfinished: set[EmbedJob] = set()
        self._failure: BatonError | None = None
        self._thread = threading.Thread(target=self._main, name="baton-embedder", daemon=True)
        self.steps = 0  # of the model, since the start

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and does not hang."""
        return self._failure is None and not self._pulse.is_stuck

    @property
    def load(self) -> EncoderLoad:
        """The calls being computed, and those that wait."""
        running = sum(job.began for job in self._unfinished)
        return EncoderLoad(running, len(self._unfinished) - running)

    def submit(self, texts: Sequence[Sequence[int]]) -> EmbedJob:
        """Queues a call. Raises Overloaded, or the error that ended the thread."""
        if self._failure is not None:
            raise self._failure
        if len(self._unfinished) >= self._limits.waiting:
            text = f"{len(self._unfinished)} calls to embed are waiting already"
            raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
        job = EmbedJob(texts, self._loop.create_future())
        self._unfinished.add(job)
        job.result.add_done_callback(lambda _: self._unfinished.discard(job))
        self._queue.put(job)
        return job

    def _main(self) -> None:
        failure: BatonError = EngineFailed("the embedder's thread has ended")
        try:
            with torch.inference_mode():
                while jobs := self._take():
                    with self._pulse.beating():
                        self._embed([job for job in jobs if not job.result.cancelled()])
            failure = EngineFailed("the embedder has been closed")
        except RuntimeError as error:  # PyTorch raises it for almost every failure
            _log.error("embedder failed", error=str(error), exc_info=True)
            failure = EngineFailed(f"the embedder failed: {error}")
        finally:
            self._loop.call_soon_threadsafe(self._end, failure)

    def _take(self) -> list[EmbedJob]:
        """Returns the waiting calls, at least one; none if the thread has to end."""
        jobs: list[EmbedJob] = []
        while not jobs or (sum(len(job.texts) for job in jobs) < self._limits.texts and not self._queue.empty()):
            job = self._queue.get()
            if job is None:
                return []
            jobs.append(job)
        return jobs

    def _embed(self, jobs: Sequence[EmbedJob]) -> None:
        found: list[list[Vector | None]] = [[None] * len(job.texts) for job in jobs]
        for job in jobs:
            job.began = True
        failed: set[int] = set()
        for step in self._steps(jobs):
            try:
                vectors = self._model.vectors([one.text for one in step])
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                failed |= {one.job for one in step}
                continue
            self.steps += 1
            for one, vector in zip(step, vectors, strict=True):
                found[one.job][one.index] = vector
        for number, job in enumerate(jobs):
            outcome: BatonError | list[Vector]
            if number in failed:
                outcome = EngineFailed("there was too little memory to compute this request")
            else:
                outcome = [vector for vector in found[number] if vector is not None]
            self._loop.call_soon_threadsafe(partial(_set_outcome, job, outcome))

    def _steps(self, jobs: Sequence[EmbedJob]) -> Iterator[list[_Place]]:
        """All texts, in steps of similar lengths that have at most `step_tokens` tokens with their padding."""
        texts = [_Place(text, number, index) for number, job in enumerate(jobs) for index, text in enumerate(job.texts)]
        step: list[_Place] = []
        for one in sorted(texts, key=lambda place: len(place.text)):
            if step and len(one.text) * (len(step) + 1) > self._limits.step_tokens:
                yield step
                step = []
            step.append(one)
        if step:
            yield step

    def _end(self, failure: BatonError) -> None:
        self._failure = failure
        for job in tuple(self._unfinished):
            _set_outcome(job, failure)


def _set_outcome(job: EmbedJob, outcome: list[Vector] | BatonError) -> None:
    if job.result.done():
        return
    if isinstance(outcome, BatonError):
        job.result.set_exception(outcome)
    else:
        job.result.set_result(outcome)
