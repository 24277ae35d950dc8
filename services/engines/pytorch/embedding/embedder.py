"""The embedded engine's embedder: a checkpoint without its head, which gives a vector for each text.

The embedder's thread: takes calls from a bounded queue, and runs the texts of all that wait together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.errors import BatonError, Overloaded
from services.engines.base import ModelFacts, Vector
from services.engines.kv import embedding_layout
from services.engines.pytorch.batch_loop import BatchJob, BatchLoop
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.embedding.text_model import TextModel, load_text_model
from services.engines.pytorch.failures import StallDetector, is_out_of_memory, too_large
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import eos_token_ids, name_of
from services.engines.pytorch.part import PyTorchPart

_RETRY_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class EmbedJob(BatchJob[list[Vector]]):
    """The texts of one call."""

    texts: Sequence[Sequence[int]]


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


class EmbedderLoop(BatchLoop[EmbedJob]):
    """Embeds on a thread while the context is open; its load is in calls."""

    def __init__(self, model: TextModel, stall_detector: StallDetector, limits: EmbedLimits) -> None:
        super().__init__("embedder", stall_detector, limits.texts, model.device)
        self._model = model
        self._limits = limits
        self.steps = 0  # of the model, since the start

    def submit(self, texts: Sequence[Sequence[int]]) -> EmbedJob:
        """Queues a call. Raises Overloaded, or the error that ended the thread."""
        self._check_failure()
        load = self.load
        if (waiting := load.running + load.waiting) >= self._limits.waiting:
            text = f"{waiting} calls to embed are waiting already"
            raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
        job = EmbedJob(self._loop.create_future(), texts, size=len(texts))
        self._enqueue([job])
        return job

    async def test(self) -> None:
        """Embeds a text of one token. Raises EngineFailed."""
        await self._test(EmbedJob(self._loop.create_future(), [[0]], is_test=True))

    def _compute(self, jobs: Sequence[EmbedJob]) -> None:
        found: list[list[Vector | None]] = [[None] * len(job.texts) for job in jobs]
        for job in jobs:
            job.began = True
        failed: set[int] = set()
        for step in self._steps(jobs):
            try:
                vectors = self._model.vectors([one.text for one in step])
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failed |= {one.job for one in step}
                continue
            self.steps += not all(jobs[one.job].is_test for one in step)
            for one, vector in zip(step, vectors, strict=True):
                found[one.job][one.index] = vector
        for number, job in enumerate(jobs):
            outcome: BatonError | list[Vector]
            outcome = too_large() if number in failed else [vector for vector in found[number] if vector is not None]
            self._post(job, outcome)

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
