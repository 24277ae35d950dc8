"""The engine that draws pictures by a pipeline of diffusers."""

from collections.abc import AsyncGenerator

import torch

from services.engines.base import DrawingRules, ModelFacts
from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.loop import DiffusionLoop
from services.engines.diffusers.pipeline import Pipeline, fingerprint
from services.engines.diffusion import Drawing, Picture, Step
from services.engines.kv import embedding_layout
from services.engines.pytorch.model.loading import device_named
from services.engines.pytorch.part import PyTorchPart
from services.engines.pytorch.stall_detector import StallDetector

_TEST_STEPS = 2  # some solvers cannot do with one


class DiffusersEngine(PyTorchPart[DiffusionConfig, DiffusionLoop]):
    """A pipeline in a folder (Diffuser)."""

    @property
    def steps(self) -> int:
        """The steps of batches so far."""
        return self._loop.steps

    def predicted_seconds(self, drawing: Drawing) -> float | None:
        """The seconds that a drawing would take from now; None if no step was measured."""
        return self._loop.predicted_seconds(drawing)

    async def draw(self, drawing: Drawing) -> AsyncGenerator[Step | Picture, None]:
        """Draws one picture. See Diffuser."""
        job = self._loop.submit(drawing)
        try:
            while (step := await job.steps.get()) is not None:
                yield step
            yield await job.result
        finally:
            job.result.cancel()

    def _load(self) -> None:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with torch.inference_mode():
            self._pipeline = Pipeline(self._config, device_named(self._config.device))
            self._pipeline.warm_up(_TEST_STEPS, self._config.guidance_scale)

    def _new_loop(self) -> DiffusionLoop:
        config, (width, height) = self._config, self._pipeline.default_size
        stall_detector = StallDetector(self._pipeline.network, config.stall_seconds)
        test = Drawing("", "", config.guidance_scale, width, height, _TEST_STEPS, seed=0)
        return DiffusionLoop(self._pipeline, stall_detector, test, config.max_batch, config.max_waiting)

    def _new_facts(self, load_seconds: float) -> ModelFacts:
        config, pipeline = self._config, self._pipeline
        dtype = str(pipeline.dtype).removeprefix("torch.")
        return ModelFacts(
            name=config.served_name,
            engine=config.kind,
            max_context_tokens=0,
            vocab_size=0,
            layout=embedding_layout(fingerprint(config.model), dtype, 1),
            load_seconds=load_seconds,
            settings=(("pipeline", pipeline.name), ("max_batch", str(config.max_batch))),
            images_only=True,
            drawing=_rules(config, pipeline),
        )


def _rules(config: DiffusionConfig, pipeline: Pipeline) -> DrawingRules:
    width, height = pipeline.default_size
    return DrawingRules(
        width=width,
        height=height,
        steps=config.steps,
        guidance_scale=config.guidance_scale,
        size_multiple=config.size_multiple,
        max_pixels=config.max_pixels,
        max_steps=config.max_steps,
        max_number=config.max_number,
        max_prompt_characters=config.max_prompt_characters,
        negative_prompt=pipeline.has_negative_prompts,
        previews=pipeline.has_previews,
    )
