"""The embedded engine's encoder: a checkpoint's vision tower and projector, without its language model."""

from collections.abc import Sequence

import torch

from services.engines.base import ModelFacts
from services.engines.prompt import Embedding, Media
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import eos_token_ids, read_config
from services.engines.pytorch.model.support import text_shape
from services.engines.pytorch.part import PyTorchPart
from services.engines.pytorch.stall_detector import StallDetector
from services.engines.pytorch.vision.encoder_loop import EncoderLoop
from services.engines.pytorch.vision.tower import Vision, load_vision


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
