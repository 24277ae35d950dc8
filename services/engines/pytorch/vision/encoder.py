"""The embedded engine's encoder: a checkpoint's vision tower and projector, without its language model."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

import torch
from typing_extensions import Self

from services.engines.base import EncoderLoad, ModelFacts
from services.engines.canary import Canary
from services.engines.prompt import Embedding, Media
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import eos_token_ids, read_config
from services.engines.pytorch.model.support import text_shape
from services.engines.pytorch.stall_detector import StallDetector
from services.engines.pytorch.vision.encoder_loop import EncoderLoop
from services.engines.pytorch.vision.tower import Vision, load_vision


class PyTorchEncoder:
    """The vision encoder of a Hugging Face model. See `services.engines.base.Encoder`."""

    def __init__(self, config: PyTorchConfig) -> None:
        self._config = config

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        self._vision = await asyncio.to_thread(self._load)
        self._facts = _facts(self._config, self._vision, time.monotonic() - began)
        config = self._config
        stall_detector = StallDetector(self._vision.module, config.stall_seconds)
        self._loop = EncoderLoop(self._vision, stall_detector, config.max_step_images, config.max_waiting)
        await self._loop.__aenter__()
        self._canary = Canary(
            self._loop.test, lambda: self._loop.quiet_seconds, config.canary_seconds, config.canary_patience_seconds
        )
        await self._canary.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._canary.__aexit__(kind, error, trace)
        await self._loop.__aexit__(kind, error, trace)

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model; the layout is that of its embeddings."""
        return self._facts

    @property
    def module(self) -> torch.nn.Module:
        """The vision tower and its projector, which belong to the encoder's thread."""
        return self._vision.module

    @property
    def healthy(self) -> bool:
        """False after a fatal error, and while the thread hangs."""
        return self._loop.healthy and not self._canary.is_overdue

    @property
    def responsive(self) -> bool:
        """False also while a test request takes far longer than usual."""
        return self.healthy and not self._canary.is_late

    def load(self) -> EncoderLoad:
        """Returns the current load."""
        return self._loop.load

    async def encode(self, media: Sequence[Media]) -> list[Embedding]:
        """Returns one embedding for each image, in order. Cancelling drops the images that have not begun."""
        jobs = self._loop.submit(media)
        try:
            return [await job.result for job in jobs]
        finally:
            for job in jobs:
                if not job.result.cancel() and not job.result.cancelled():
                    job.result.exception()  # Retrieved, so that asyncio does not log it as lost.

    def _load(self) -> Vision:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with torch.inference_mode():
            return load_vision(self._config)


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
