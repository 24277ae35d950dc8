"""The embedded engine's embedder: a checkpoint without its head, which gives a vector for each text."""

from collections.abc import Sequence

import torch

from services.engines.base import ModelFacts
from services.engines.embedding import Vector
from services.engines.kv import embedding_layout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.embedding.embedder_loop import EmbedderLoop, EmbedLimits
from services.engines.pytorch.embedding.text_model import TextModel, load_text_model
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import eos_token_ids, name_of
from services.engines.pytorch.part import PyTorchPart
from services.engines.pytorch.stall_detector import StallDetector

_DEFAULT_STEP_TOKENS = {"cpu": 4096, "cuda": 16384}


class PyTorchEmbedder(PyTorchPart[PyTorchConfig, EmbedderLoop]):
    """A Hugging Face model that turns texts into vectors (TextEmbedder)."""

    @property
    def steps(self) -> int:
        """The number of runs of the model for calls."""
        return self._loop.steps

    async def embed(self, inputs: Sequence[Sequence[int]]) -> list[Vector]:
        """Returns a vector for each input, in order; not normalized. Cancelling drops a call that has not begun."""
        job = self._loop.submit(inputs)
        try:
            return await job.result
        finally:
            job.result.cancel()

    def _load(self) -> None:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with torch.inference_mode():
            self._model = load_text_model(self._config)
            self._model.vectors([[0] * min(8, self._model.rules.max_input_tokens)])

    def _new_loop(self) -> EmbedderLoop:
        stall_detector = StallDetector(self._model.module, self._config.stall_seconds)
        return EmbedderLoop(self._model, stall_detector, _limits(self._config, self._model))

    def _new_facts(self, load_seconds: float) -> ModelFacts:
        return _facts(self._config, self._model, load_seconds)


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
