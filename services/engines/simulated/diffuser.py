"""A Diffuser without a model: pictures and clips of noise, which follow from what is asked for alone."""

import asyncio
import hashlib
import io
from collections.abc import AsyncGenerator, Sequence
from dataclasses import astuple, replace

import numpy
from PIL import Image

from baton.errors import Overloaded
from services.engines.base import ModelFacts
from services.engines.diffusion import Clip, Drawing, Picture, Step
from services.engines.rules import ClipRules, DrawingRules
from services.engines.simulated.encoder import SimulatedPart
from services.engines.simulated.tokens import Vocabulary

_RULES = DrawingRules(
    width=64,
    height=64,
    steps=8,
    guidance_scale=3.0,
    size_multiple=16,
    max_pixels=2**18,
    max_steps=1000,
    max_number=4,
    max_prompt_characters=2000,
    negative_prompt=True,
    previews=True,
    clips=ClipRules(frames=4, max_frames=64, frame_multiple=1, frames_per_second=8.0, mp4=False),
)


class SimulatedDiffuser(SimulatedPart):
    """Computes one picture after the other, with `draw_step_seconds` a step."""

    steps = 0
    """The number of steps so far."""

    def _new_facts(self, vocabulary: Vocabulary, load_seconds: float) -> ModelFacts:
        return replace(super()._new_facts(vocabulary, load_seconds), drawing=_RULES)

    def predicted_seconds(self, drawings: Sequence[Drawing]) -> float | None:
        """The seconds that drawings would take from now."""
        return (self._unfinished + len(drawings)) * drawings[0].steps * self._config.draw_step_seconds

    async def draw(self, drawing: Drawing) -> AsyncGenerator[Step | Picture | Clip, None]:
        """Draws noise. See Diffuser."""
        if self._unfinished >= self._config.max_waiting:
            raise Overloaded(f"{self._unfinished} pictures wait already", retry_after_seconds=1.0)
        self._unfinished += 1
        try:
            async with self._turn:
                for number in range(1, drawing.steps + 1):
                    await asyncio.sleep(self._config.draw_step_seconds)
                    self.steps += 1
                    yield self._step(drawing, number)
                yield await _drawn(drawing)
        finally:
            self._unfinished -= 1

    def _step(self, drawing: Drawing, number: int) -> Step:
        every, remaining = drawing.preview_steps, (drawing.steps - number) * self._config.draw_step_seconds
        is_due = every and number % every == 0 and number < drawing.steps
        return Step(number, drawing.steps, remaining, _noise(replace(drawing, steps=number)) if is_due else b"")


async def _drawn(drawing: Drawing) -> Picture | Clip:
    if drawing.clip is None:
        return Picture(_noise(drawing), drawing.width, drawing.height)
    frames: list[bytes] = []
    for number in range(drawing.frames):
        frames.append(_noise(replace(drawing, seed=drawing.seed + number, clip=None)))
        await asyncio.sleep(0)
    return Clip(b"", tuple(frames), drawing.width, drawing.height)


def _noise(drawing: Drawing) -> bytes:
    asked = replace(drawing, preview_steps=0)
    seed = int.from_bytes(hashlib.sha256(repr(astuple(asked)).encode()).digest()[:8], "little")
    pixels = numpy.random.default_rng(seed).integers(0, 256, (drawing.height, drawing.width, 3), numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", compress_level=0)
    return file.getvalue()
