"""The Protocol of engines that draw pictures and clips, and what goes in and comes out."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.engines.base import EnginePart


@dataclass(frozen=True, slots=True)
class ClipOptions:
    """The length of a clip and its form: one MP4, or else a PNG of each frame."""

    frames: int
    frames_per_second: float
    is_mp4: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """One picture or clip to draw, within the engine's rules. A preview comes after each `preview_steps` steps; 0 is
    none.
    """

    prompt: str
    negative_prompt: str
    guidance_scale: float
    width: int
    height: int
    steps: int
    seed: int
    preview_steps: int = 0
    clip: ClipOptions | None = None

    @property
    def frames(self) -> int:
        """1 of a picture."""
        return self.clip.frames if self.clip else 1


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


@dataclass(frozen=True, slots=True)
class Clip:
    """A finished clip: one MP4, or else a PNG of each frame."""

    mp4: bytes
    frames: tuple[bytes, ...]
    width: int
    height: int


class Diffuser(EnginePart, Protocol):
    """An engine whose facts have `drawing`."""

    def predicted_seconds(self, drawings: Sequence[Drawing]) -> float | None:
        """The time that drawings of one shape would take from now, by the measured steps and what waits; None if
        unknown.
        """

    def draw(self, drawing: Drawing) -> AsyncGenerator[Step | Picture | Clip, None]:
        """Draws; the last item is the only Picture or Clip. The same drawing gives the same bytes.

        Closing the generator ends the work within a step, unless others are computed in the same batch.
        """
