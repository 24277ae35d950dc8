"""The embedded engine's encoder: a checkpoint's vision tower and projector, without its language model.

The encoder's thread: takes images from a bounded queue, encodes all that wait together, and returns embeddings.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO

import torch
from PIL import Image

from baton.errors import BatonError, ComputeFailed, InvalidRequest, Overloaded
from media.image import read_pixels
from services.engines.base import ModelFacts
from services.engines.prompt import Embedding, Media
from services.engines.pytorch.batch_loop import BatchJob, BatchLoop
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.failures import StallDetector
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import eos_token_ids, name_of, read_config
from services.engines.pytorch.model.support import text_shape
from services.engines.pytorch.part import PyTorchPart
from services.engines.pytorch.vision.tower import Vision, load_vision

_RETRY_SECONDS = 1.0


@cache
def _grey() -> Media:
    file = BytesIO()
    Image.new("RGB", (64, 64), (128, 128, 128)).save(file, "PNG")
    return Media(file.getvalue(), "image/png")


@dataclass(eq=False, slots=True)
class EncodeJob(BatchJob[Embedding]):
    """An image to encode, which errors name by `field`."""

    media: Media
    field: str


@dataclass(frozen=True, slots=True)
class _Prepared:
    job: EncodeJob
    pixels: torch.Tensor


class EncoderLoop(BatchLoop[EncodeJob]):
    """Encodes on a thread while the context is open; its load is in images."""

    def __init__(self, vision: Vision, stall_detector: StallDetector, max_batch: int, max_waiting: int) -> None:
        super().__init__("encoder", stall_detector, max_batch, vision.device)
        self._vision = vision
        self._max_waiting = max_waiting

    def submit(self, media: Sequence[Media]) -> list[EncodeJob]:
        """Queues all images or none. Raises Overloaded, or the error that ended the thread."""
        self._check_failure()
        load = self.load
        if (waiting := load.running + load.waiting) and waiting + len(media) > self._max_waiting:
            text = f"{waiting} images are waiting already"
            raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
        jobs = [EncodeJob(self._loop.create_future(), one, f"media[{index}]") for index, one in enumerate(media)]
        self._enqueue(jobs)
        return jobs

    async def test(self) -> None:
        """Encodes a small grey image. Raises EngineFailed."""
        await self._test(EncodeJob(self._loop.create_future(), _grey(), "test", is_test=True))

    def _compute(self, jobs: Sequence[EncodeJob]) -> None:
        prepared = [one for job in jobs if (one := self._prepare(job)) is not None]
        if not prepared:
            return
        for one, rows in zip(prepared, self._vision.look([one.pixels for one in prepared]), strict=True):
            self._post(one.job, self._embedding(one.job.media, rows))

    def _prepare(self, job: EncodeJob) -> _Prepared | None:
        job.began = True
        try:
            return _Prepared(job, self._vision.prepare(read_pixels(job.media.content, f"{job.field}.data")))
        except BatonError as error:
            self._post(job, error)
        except (ValueError, TypeError) as error:  # image processors raise it for images that they do not support
            refusal = InvalidRequest.of(f"{job.field}.data", f"the model's image processor does not take it: {error}")
            self._post(job, refusal)
        return None

    def _embedding(self, media: Media, rows: torch.Tensor) -> Embedding | BatonError:
        if not bool(rows.isfinite().all()):
            return ComputeFailed("the vision tower computed NaN or infinity for this image")
        digest = hashlib.sha256(self._vision.fingerprint.encode() + hashlib.sha256(media.content).digest()).digest()
        data = rows.contiguous().view(torch.uint8).numpy().tobytes()
        return Embedding(digest, (rows.shape[0], rows.shape[1]), name_of(rows.dtype), data)


class PyTorchEncoder(PyTorchPart[PyTorchConfig, EncoderLoop]):
    """The vision encoder of a Hugging Face model (Encoder); the layout of its facts is that of its embeddings."""

    @property
    def module(self) -> torch.nn.Module:
        """The vision tower and its projector, which belong to the encoder's thread."""
        return self._vision.module

    async def encode(self, media: Sequence[Media]) -> list[Embedding]:
        """Returns one embedding for each image, in order. Cancelling drops the images that have not begun."""
        jobs = self._loop.submit(media)
        try:
            return [await job.result for job in jobs]
        finally:
            for job in jobs:
                if not job.result.cancel() and not job.result.cancelled():
                    job.result.exception()  # Retrieved, so that asyncio does not log it as lost.

    def _load(self) -> None:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with torch.inference_mode():
            self._vision = load_vision(self._config)

    def _new_loop(self) -> EncoderLoop:
        config = self._config
        stall_detector = StallDetector(self._vision.module, config.stall_seconds)
        return EncoderLoop(self._vision, stall_detector, config.max_step_images, config.max_waiting)

    def _new_facts(self, load_seconds: float) -> ModelFacts:
        return _facts(self._config, self._vision, load_seconds)


def _facts(config: PyTorchConfig, vision: Vision, load_seconds: float) -> ModelFacts:
    model_config = read_config(config.model)
    shape = text_shape(model_config, config.max_context_tokens)
    return ModelFacts(
        name=config.served_name,
        engine="pytorch",
        max_context_tokens=shape.max_context_tokens,
        vocab_size=shape.vocab_size,
        max_logprobs=min(config.max_logprobs, shape.vocab_size),
        eos_token_ids=eos_token_ids(config.model, model_config),
        layout=vision.rules.embedding_layout,
        files=checkpoint.model_files(config.model),
        load_seconds=load_seconds,
        images=vision.rules,
    )
