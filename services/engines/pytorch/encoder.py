"""The embedded engine's encode role: a checkpoint's vision tower and projector, and nothing of its language model."""

import asyncio
import time
from collections.abc import Sequence

import torch
from typing_extensions import Self

from services.engine import EncoderLoad, ModelFacts
from services.engines.pytorch import checkpoint
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.encoder_loop import EncoderLoop
from services.engines.pytorch.model import eos_token_ids, read_config
from services.engines.pytorch.pulse import Pulse
from services.engines.pytorch.support import text_shape
from services.engines.pytorch.vision import Vision, load_vision
from services.prompt import Embedding, Media


class PyTorchEncoder:
    """The eyes of a Hugging Face model, as `services.engine.Encoder` describes them."""

    def __init__(self, config: PyTorchConfig) -> None:
        self._config = config

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        self._vision = await asyncio.to_thread(self._load)
        self._facts = _facts(self._config, self._vision, time.monotonic() - began)
        config = self._config
        pulse = Pulse(self._vision.device.type, config.stall_seconds)
        self._loop = EncoderLoop(self._vision, pulse, config.max_step_images, config.max_waiting)
        await self._loop.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._loop.__aexit__(*exc)

    @property
    def facts(self) -> ModelFacts:
        """Of the model; the layout is that of its embeddings."""
        return self._facts

    @property
    def healthy(self) -> bool:
        """False after a failure that no request survives."""
        return self._loop.healthy

    def load(self) -> EncoderLoad:
        """As of now."""
        return self._loop.load

    async def encode(self, media: Sequence[Media]) -> list[Embedding]:
        """One embedding for each image, in order. Whatever ends it, what has not begun by then is dropped."""
        jobs = self._loop.submit(media)
        try:
            return [await job.result for job in jobs]
        finally:
            for job in jobs:
                if not job.result.cancel() and not job.result.cancelled():
                    job.result.exception()  # Looked at, so that asyncio does not complain of it.

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
