"""The engine that draws pictures and clips by a pipeline of diffusers.

The engine's thread: takes drawings from a bounded queue, and computes those of equal shape that wait together.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from baton.errors import InvalidRequest, Overloaded
from runtime.clock import monotonic
from services.engines.base import ModelFacts
from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.leader import open_group
from services.engines.diffusers.pipeline import HAS_MP4, Pipeline, fingerprint
from services.engines.diffusers.ranks import REFUSALS
from services.engines.diffusion import Clip, Drawing, Picture, Step
from services.engines.kv import embedding_layout
from services.engines.pytorch.batch_loop import BatchJob, BatchLoop
from services.engines.pytorch.failures import StallDetector, is_out_of_memory
from services.engines.pytorch.model.loading import device_named
from services.engines.pytorch.part import PyTorchPart
from services.engines.rules import ClipRules, DrawingRules

_RETRY_SECONDS = 1.0
_NEWEST_SHARE = 0.3  # of a measurement in the average
_MOST_UNREAD = 4  # steps of a picture; there is no preview while more wait, since each may be megabytes
_LONGEST_REASON = 200  # in characters


class _NobodyWaits(Exception):
    """All clients of a batch have left."""


@dataclass(eq=False, slots=True)
class DrawJob(BatchJob[Picture | Clip]):
    """One picture or clip. `steps` has None at last, when `result` is there."""

    drawing: Drawing
    steps: "asyncio.Queue[Step | None]" = field(default_factory=asyncio.Queue)

    @property
    def shape(self) -> "Shape":
        """Drawings of the same shape can be computed together."""
        drawing = self.drawing
        return (drawing.width, drawing.height, drawing.frames, drawing.steps, drawing.guidance_scale)


class StepTimes:
    """The recent seconds of a step, by the size of a drawing, its frames, and the number of drawings in the batch."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int, int, int], float] = {}

    def learn(self, drawing: Drawing, pictures: int, seconds: float) -> None:
        """Adds a measurement."""
        key = (drawing.width, drawing.height, drawing.frames, pictures)
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + _NEWEST_SHARE * (seconds - known)

    def step_seconds(self, drawing: Drawing, pictures: int = 1) -> float | None:
        """None if none was measured."""
        return self._seconds.get((drawing.width, drawing.height, drawing.frames, pictures))


class DiffusionLoop(BatchLoop[DrawJob]):
    """Draws on a thread while the context is open; its load is in pictures."""

    def __init__(
        self, pipeline: Pipeline, stall_detector: StallDetector, test: Drawing, max_batch: int, max_waiting: int
    ) -> None:
        super().__init__("diffuser", stall_detector, max_batch, pipeline.device)
        self._pipeline = pipeline
        self._test_drawing = test
        self._max_waiting = max_waiting
        self._times = StepTimes()
        self.steps = 0  # of batches, since the start

    def submit(self, drawing: Drawing) -> DrawJob:
        """Queues a drawing. Raises Overloaded, or the error that ended the thread."""
        self._check_failure()
        load = self.load
        if load.waiting >= self._max_waiting:
            raise Overloaded(f"{load.waiting} pictures wait already", retry_after_seconds=_RETRY_SECONDS)
        job = self._new_job(drawing)
        self._enqueue([job])
        return job

    async def test(self) -> None:
        """Draws with as few steps as there can be. Raises EngineFailed."""
        job = self._new_job(self._test_drawing)
        job.is_test = True
        await self._test(job)

    def predicted_seconds(self, drawings: Sequence[Drawing]) -> float | None:
        """The seconds that drawings of one shape would take from now; None if no step was measured."""
        ahead = sum(
            (self._times.step_seconds(job.drawing) or 0.0) * job.drawing.steps
            for job in self._unfinished
            if not job.began and not job.is_test
        )
        each = self._times.step_seconds(drawings[0])
        batches = -(-len(drawings) // self._most_at_once)
        return None if each is None else each * drawings[0].steps * batches + ahead / self._most_at_once

    def _new_job(self, drawing: Drawing) -> DrawJob:
        job = DrawJob(self._loop.create_future(), drawing)
        job.result.add_done_callback(lambda _: job.steps.put_nowait(None))
        return job

    def _compute(self, jobs: Sequence[DrawJob]) -> None:
        for alike in _by_shape([job for job in jobs if not job.result.done()]):
            for job in alike:
                job.began = True
            try:
                self._draw(alike)
            except _NobodyWaits:
                pass
            except (RuntimeError, *REFUSALS) as error:
                if any(job.is_test for job in alike) or not self._can_go_on(error):
                    raise
                self._refuse(alike, error)
        self._pipeline.free()

    def _draw(self, jobs: Sequence[DrawJob]) -> None:
        drawn = self._pipeline.draw([job.drawing for job in jobs], self._after_step(jobs))
        for job, result in zip(jobs, drawn, strict=True):
            self._post(job, result)

    def _can_go_on(self, error: Exception) -> bool:
        """True if it is only these drawings that fail, as those of a size that the networks cannot have."""
        if not isinstance(error, RuntimeError):
            return True
        if is_out_of_memory(error):
            return False
        try:
            self._pipeline.draw([self._test_drawing], lambda _done, _preview: None)
        except RuntimeError:
            return False
        return True

    def _refuse(self, jobs: Sequence[DrawJob], error: Exception) -> None:
        text = f"{self._pipeline.name} cannot draw this: {str(error)[:_LONGEST_REASON]}"
        for job in jobs:
            self._post(job, InvalidRequest.of("options", text))

    def _after_step(self, jobs: Sequence[DrawJob]) -> Callable[[int, Callable[[int], bytes]], None]:
        """Measures each step but the first, tells the clients that still wait, and ends a batch without any."""
        drawing, began = jobs[0].drawing, monotonic()

        def after_step(done: int, preview: Callable[[int], bytes]) -> None:
            nonlocal began
            self.steps += 1
            now = monotonic()
            if done > 1:
                self._times.learn(drawing, len(jobs), now - began)
            if all(job.result.cancelled() for job in jobs):
                raise _NobodyWaits
            each = self._times.step_seconds(drawing, len(jobs))
            remaining = None if each is None else each * (drawing.steps - done)
            for index, job in enumerate(jobs):
                every = job.drawing.preview_steps
                is_wanted = not job.result.cancelled() and job.steps.qsize() <= _MOST_UNREAD
                is_due = every and done % every == 0 and done < drawing.steps and is_wanted
                step = Step(done, drawing.steps, remaining, preview(index) if is_due else b"")
                self._loop.call_soon_threadsafe(job.steps.put_nowait, step)
            began = monotonic()

        return after_step


Shape = tuple[int, int, int, int, float]


def _by_shape(jobs: Sequence[DrawJob]) -> Iterator[list[DrawJob]]:
    shapes: dict[Shape, list[DrawJob]] = {}
    for job in jobs:
        shapes.setdefault(job.shape, []).append(job)
    yield from shapes.values()


_TEST_STEPS = 2  # some solvers cannot do with one


class DiffusersEngine(PyTorchPart[DiffusionConfig, DiffusionLoop]):
    """A pipeline in a folder (Diffuser)."""

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await asyncio.to_thread(self._group.close)

    @property
    def healthy(self) -> bool:
        """False also once the process of another rank has ended."""
        return self._group.failure is None and super().healthy

    @property
    def steps(self) -> int:
        """The steps of batches so far."""
        return self._loop.steps

    @property
    def reused_calls(self) -> int:
        """The calls of the network so far, of which TeaCache left out the blocks."""
        return self._pipeline.reused_calls

    def predicted_seconds(self, drawings: Sequence[Drawing]) -> float | None:
        """The seconds that drawings of one shape would take from now; None if no step was measured."""
        return self._loop.predicted_seconds(drawings)

    async def draw(self, drawing: Drawing) -> AsyncGenerator[Step | Picture | Clip, None]:
        """Draws one picture or clip. See Diffuser."""
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
        self._group = open_group(self._config)
        try:
            with torch.inference_mode():
                self._pipeline = Pipeline(self._config, device_named(self._config.device), self._group)
                self._pipeline.warm_up(_TEST_STEPS, self._config.guidance_scale, self._config.max_batch)
        except BaseException:
            self._group.close()
            raise

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
            settings=(
                ("pipeline", pipeline.name),
                ("max_batch", str(config.max_batch)),
                ("tensor_parallel_size", str(config.tensor_parallel_size)),
            ),
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
        clips=_clip_rules(config, pipeline) if pipeline.has_clips else None,
    )


def _clip_rules(config: DiffusionConfig, pipeline: Pipeline) -> ClipRules:
    return ClipRules(
        frames=config.frames,
        max_frames=config.max_frames,
        frame_multiple=pipeline.frame_multiple,
        frames_per_second=config.frames_per_second,
        mp4=HAS_MP4,
    )
