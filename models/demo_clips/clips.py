"""The training data: clips of one figure that moves in a straight line, and the words for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from zlib import crc32

import numpy
import torch
from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast

from models.demo.exercises.scenes import COLORS, SHAPES, SIDE, Color, Figure, Scene, draw, random_scene
from models.demo_diffusion.drawings import Drawings

FRAMES = 8
"""Frames of a clip."""

DIRECTIONS = MappingProxyType({"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)})
"""Right and down, by the word."""

HELD_OUT_SHARE = 4
"""About one in this many prompts is excluded from training."""

SLOWEST, FASTEST = 2.5, 5.0
"""Pixels from one frame to the next."""

_LEFT_OUT = 0.1


@dataclass(frozen=True, slots=True)
class Clip:
    """A figure in its first place, and where it goes; `speed` is in pixels a frame."""

    figure: Figure
    direction: str
    speed: float
    background: Color

    @property
    def prompt(self) -> str:
        """For example 'a red circle moves left'."""
        return f"a {self.figure.name} moves {self.direction}"

    def frames(self) -> list[Image.Image]:
        """The pictures, in order."""
        across, down = DIRECTIONS[self.direction]
        ways = [self.speed * index for index in range(FRAMES)]
        places = [(self.figure.x + across * way, self.figure.y + down * way) for way in ways]
        return [draw(Scene((replace(self.figure, x=x, y=y),), self.background)) for x, y in places]


def random_clip(random: Random) -> Clip:
    """Returns a clip whose figure is whole in every frame."""
    scene = random_scene(random)
    figure, direction = scene.figures[0], random.choice(tuple(DIRECTIONS))
    room = SIDE - 2 * figure.radius
    speed = random.uniform(SLOWEST, min(FASTEST, room / (FRAMES - 1)))
    begin = figure.radius + random.uniform(0, room - speed * (FRAMES - 1))
    begin = SIDE - begin if direction in ("left", "up") else begin
    placed = replace(figure, x=begin) if direction in ("left", "right") else replace(figure, y=begin)
    return Clip(placed, direction, speed, scene.background)


def is_held_out(prompt: str) -> bool:
    """True if the prompt belongs to the evaluation."""
    return crc32(prompt.encode()) % HELD_OUT_SHARE == 0


def held_out_prompts() -> list[str]:
    """All prompts that training never sees."""
    prompts = [f"a {color} {shape} moves {way}" for color in COLORS for shape in SHAPES for way in DIRECTIONS]
    return [prompt for prompt in prompts if is_held_out(prompt)]


def held_out_clips(prompts: Sequence[str], seed: int) -> list[Clip]:
    """Real clips of these prompts."""
    random, found = Random(seed), dict[str, Clip]()
    while len(found) < len(set(prompts)):
        clip = random_clip(random)
        if clip.prompt in prompts:
            found[clip.prompt] = clip
    return [found[prompt] for prompt in prompts]


class RandomClips(IterableDataset[Drawings]):
    """Batches of `size` clips without end, other ones in each worker process; pixels are (n, frames, 3, side, side).

    The prompt of one in ten is left out, for guidance, which compares with the prompt "".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, size: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._size = size

    def __iter__(self) -> Iterator[Drawings]:
        worker = get_worker_info()
        random = Random(f"{self._seed} {worker.id if worker else 0}")
        while True:
            clips = [self._clip(random) for _ in range(self._size)]
            pixels = numpy.stack([numpy.asarray(frame) for clip in clips for frame in clip.frames()])
            frames = torch.from_numpy(pixels).permute(0, 3, 1, 2).unflatten(0, (self._size, FRAMES)).contiguous()
            prompts = ["" if random.random() < _LEFT_OUT else clip.prompt for clip in clips]
            yield Drawings(frames, self._tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids)

    def _clip(self, random: Random) -> Clip:
        while is_held_out((clip := random_clip(random)).prompt):
            pass
        return clip
