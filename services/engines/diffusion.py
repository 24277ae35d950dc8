"""The Protocol of engines that draw pictures, and what goes in and comes out."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from services.engines.base import EnginePart


@dataclass(frozen=True, slots=True)
class Drawing:
    """One picture to draw, within the engine's rules. A preview comes after each `preview_steps` steps; 0 is none."""

    prompt: str
    negative_prompt: str
    guidance_scale: float
    width: int
    height: int
    steps: int
    seed: int
    preview_steps: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A step is done, of `steps`. The others are expected to take `remaining_seconds`; None if that is unknown."""

    number: int
    steps: int
    remaining_seconds: float | None
    preview: bytes = b""  # a PNG


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished picture, as a PNG."""

    png: bytes
    width: int
    height: int


class Diffuser(EnginePart, Protocol):
    """An engine whose facts have `drawing`."""

    def predicted_seconds(self, drawing: Drawing) -> float | None:
        """The time that a drawing would take from now, by the measured steps and what waits; None if unknown."""

    def draw(self, drawing: Drawing) -> AsyncGenerator[Step | Picture, None]:
        """Draws; the last item is the only Picture. The same drawing gives the same picture.

        Closing the generator ends the work within a step, unless others are computed in the same batch.
        """
