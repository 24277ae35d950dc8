"""The encoder's thread: takes images from a bounded queue, encodes all that wait together, and returns embeddings."""

import asyncio
import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from typing_extensions import Self

from baton.errors import BatonError, EngineFailed, InvalidRequest, Overloaded
from media.image import read_pixels
from services.engines.base import EncoderLoad
from services.engines.prompt import Embedding, Media
from services.engines.pytorch.model.loading import name_of
from services.engines.pytorch.stall_detector import StallDetector
from services.engines.pytorch.vision.tower import Vision

_log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Job:
    """An image to encode, which errors name by `field`. Cancelling `result` drops it, if it has not begun."""

    media: Media
    field: str
    result: "asyncio.Future[Embedding]"
    began: bool = False


@dataclass(frozen=True, slots=True)
class _Prepared:
    job: Job
    pixels: torch.Tensor


class EncoderLoop:
    """Encodes on a thread while the context is open.

    `healthy` becomes false when the thread ends: then every waiting and later call fails. It is also false while the
    thread hangs; only the end of the process helps then.
    """

    def __init__(self, vision: Vision, pulse: StallDetector, max_batch: int, max_waiting: int) -> None:
        self._vision = vision
        self._pulse = pulse
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._unfinished: set[Job] = set()
        self._failure: BatonError | None = None
        self._thread = threading.Thread(target=self._main, name="baton-encoder", daemon=True)

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
        """The images being encoded, and those that wait."""
        running = sum(job.began for job in self._unfinished)
        return EncoderLoad(running, len(self._unfinished) - running)

    def submit(self, media: Sequence[Media]) -> list[Job]:
        """Queues all images or none. Raises Overloaded, or the error that ended the thread."""
        if self._failure is not None:
            raise self._failure
        if self._unfinished and len(self._unfinished) + len(media) > self._max_waiting:
            text = f"{len(self._unfinished)} images are waiting already"
            raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
        jobs = [Job(one, f"media[{index}]", self._loop.create_future()) for index, one in enumerate(media)]
        for job in jobs:
            self._unfinished.add(job)
            job.result.add_done_callback(partial(self._forget, job))
            self._queue.put(job)
        return jobs

    def _forget(self, job: Job, _: object) -> None:
        self._unfinished.discard(job)

    def _main(self) -> None:
        failure: BatonError = EngineFailed("the encoder's thread has ended")
        try:
            with torch.inference_mode():
                while jobs := self._take():
                    with self._pulse.beating():
                        self._encode([job for job in jobs if not job.result.cancelled()])
            failure = EngineFailed("the encoder has been closed")
        except RuntimeError as error:  # PyTorch raises it for almost every failure
            _log.error("encoder failed", error=str(error), exc_info=True)
            failure = EngineFailed(f"the encoder failed: {error}")
        finally:
            self._loop.call_soon_threadsafe(self._end, failure)

    def _take(self) -> list[Job]:
        """Returns the waiting images, at least one; none if the thread has to end."""
        jobs: list[Job] = []
        while not jobs or (len(jobs) < self._max_batch and not self._queue.empty()):
            job = self._queue.get()
            if job is None:
                return []
            jobs.append(job)
        return jobs

    def _encode(self, jobs: Sequence[Job]) -> None:
        prepared = [one for job in jobs if (one := self._prepare(job)) is not None]
        if not prepared:
            return
        for one, rows in zip(prepared, self._vision.look([one.pixels for one in prepared]), strict=True):
            self._post(partial(_set_outcome, one.job, self._embedding(one.job.media, rows)))

    def _prepare(self, job: Job) -> _Prepared | None:
        job.began = True
        try:
            return _Prepared(job, self._vision.prepare(read_pixels(job.media.content, f"{job.field}.data")))
        except BatonError as error:
            self._post(partial(_set_outcome, job, error))
        except (ValueError, TypeError) as error:  # image processors raise it for images that they do not support
            refusal = InvalidRequest.of(f"{job.field}.data", f"the model's image processor does not take it: {error}")
            self._post(partial(_set_outcome, job, refusal))
        return None

    def _embedding(self, media: Media, rows: torch.Tensor) -> Embedding | BatonError:
        if not bool(rows.isfinite().all()):
            return EngineFailed("the vision tower computed NaN or infinity for this image")
        digest = hashlib.sha256(self._vision.fingerprint.encode() + hashlib.sha256(media.content).digest()).digest()
        data = rows.contiguous().view(torch.uint8).numpy().tobytes()
        return Embedding(digest, (rows.shape[0], rows.shape[1]), name_of(rows.dtype), data)

    def _post(self, outcome: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(outcome)

    def _end(self, failure: BatonError) -> None:
        self._failure = failure
        for job in tuple(self._unfinished):
            _set_outcome(job, failure)


def _set_outcome(job: Job, outcome: Embedding | BatonError) -> None:
    if job.result.done():
        return
    if isinstance(outcome, BatonError):
        job.result.set_exception(outcome)
    else:
        job.result.set_result(outcome)
