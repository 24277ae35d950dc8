"""The embedded engine's embedder: a checkpoint without its head, which gives a vector for each text."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

import torch
from typing_extensions import Self

from services.engines.base import EncoderLoad, ModelFacts
from services.engines.canary import Canary
from services.engines.embedding import Vector
from services.engines.kv import embedding_layout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.embedding.embedder_loop import EmbedderLoop, EmbedLimits
from services.engines.pytorch.embedding.text_model import TextModel, load_text_model
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import eos_token_ids, name_of
from services.engines.pytorch.stall_detector import StallDetector

_DEFAULT_STEP_TOKENS = {"cpu": 4096, "cuda": 16384}


class PyTorchEmbedder:
    """A Hugging Face model that turns texts into vectors. See `services.engines.embedding.TextEmbedder`."""

    def __init__(self, config: PyTorchConfig) -> None:
        self._config = config

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        self._model = await asyncio.to_thread(self._load)
        config = self._config
        self._facts = _facts(config, self._model, time.monotonic() - began)
        stall_detector = StallDetector(self._model.module, config.stall_seconds)
        self._loop = EmbedderLoop(self._model, stall_detector, _limits(config, self._model))
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
        """The facts of the model, with the rules of its vectors."""
        return self._facts

    @property
    def healthy(self) -> bool:
        """False after a fatal error, and while the thread hangs."""
        return self._loop.healthy and not self._canary.is_overdue

    @property
    def responsive(self) -> bool:
        """False also while a test request takes far longer than usual."""
        return self.healthy and not self._canary.is_late

    @property
    def steps(self) -> int:
        """The number of runs of the model for calls."""
        return self._loop.steps

    def load(self) -> EncoderLoad:
        """Returns the current load."""
        return self._loop.load

    async def embed(self, inputs: Sequence[Sequence[int]]) -> list[Vector]:
        """Returns a vector for each input, in order; not normalized. Cancelling drops a call that has not begun."""
        job = self._loop.submit(inputs)
        try:
            return await job.result
        finally:
            job.result.cancel()

    def _load(self) -> TextModel:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with torch.inference_mode():
            model = load_text_model(self._config)
            model.vectors([[0] * min(8, model.rules.max_input_tokens)])
            return model


def _limits(config: PyTorchConfig, model: TextModel) -> EmbedLimits:
    step_tokens = config.max_step_tokens or _DEFAULT_STEP_TOKENS[model.device.type]
    return EmbedLimits(config.max_step_inputs, step_tokens, config.max_waiting)


def _facts(config: PyTorchConfig, model: TextModel, load_seconds: float) -> ModelFacts:
    return ModelFacts(
        name=config.served_name,
        engine="pytorch",
        max_context_tokens=model.rules.max_input_tokens,
        vocab_size=int(model.config.get_text_config().vocab_size),
        eos_token_ids=eos_token_ids(config.model, model.config),
        layout=embedding_layout(checkpoint.fingerprint(config.model), name_of(model.dtype), model.rules.dimensions),
        files=checkpoint.model_files(config.model),
        load_seconds=load_seconds,
        embedding=model.rules,
        embeddings_only=not model.generates,
    )
