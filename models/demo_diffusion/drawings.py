"""The training data: pictures of random scenes, and the words for them."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from threading import Thread
from zlib import crc32

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast

from models.demo.exercises.picture_tasks import describe
from models.demo.exercises.scenes import Scene, draw, random_scene

HELD_OUT_SHARE = 20
"""One in this many prompts of two figures and more is excluded from training."""

_LEFT_OUT = 0.1


@dataclass(frozen=True, slots=True)
class Drawings:
    """Pictures as (n, 3, side, side) bytes, and the token ids of their prompts."""

    pixels: torch.Tensor
    ids: torch.Tensor


def prompt_of(scene: Scene) -> str:
    """All figures from left to right, for example 'a red circle and a blue square'."""
    return describe(Random(0), scene).answer


def is_held_out(scene: Scene) -> bool:
    """True if the scene's prompt belongs to the evaluation."""
    return len(scene.figures) > 1 and crc32(prompt_of(scene).encode()) % HELD_OUT_SHARE == 0


def held_out_scenes(count: int, seed: int) -> dict[str, Scene]:
    """Prompts that training never sees, each with a scene; two, three and four figures are equally likely."""
    random, found = Random(seed), dict[str, Scene]()
    while len(found) < count:
        scene = random_scene(random)
        if is_held_out(scene):
            found.setdefault(prompt_of(scene), scene)
    return found


class RandomDrawings(IterableDataset[Drawings]):
    """Batches of `size` drawings without end, other ones in each worker process.

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
            scenes = [self._scene(random) for _ in range(self._size)]
            pixels = numpy.stack([numpy.asarray(draw(scene)) for scene in scenes])
            prompts = ["" if random.random() < _LEFT_OUT else prompt_of(scene) for scene in scenes]
            ids = self._tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
            yield Drawings(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), ids)

    def _scene(self, random: Random) -> Scene:
        while is_held_out(scene := random_scene(random)):
            pass
        return scene


def in_workers(drawings: RandomDrawings, workers: int) -> Iterator[Drawings]:
    """The batches, made in so many processes."""
    return iter(DataLoader(drawings, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None))


class Drawn:
    """Drawings on the device that trains: all that workers have drawn so far, of which each step takes some at random.

    Workers draw more slowly than a GPU learns.
    """

    def __init__(self, batches: Iterator[Drawings], device: torch.device, capacity: int) -> None:
        self._batches = batches
        first = next(batches)
        self._pixels = torch.empty((capacity, *first.pixels.shape[1:]), dtype=torch.uint8, device=device)
        self._ids = torch.empty((capacity, first.ids.shape[1]), dtype=first.ids.dtype, device=device)
        self.count = 0
        self._add(first)
        Thread(target=self._collect, daemon=True).start()

    def take(self, size: int) -> Drawings:
        """Returns this many, some of them perhaps twice."""
        rows = torch.randint(self.count, (size,), device=self._pixels.device)
        return Drawings(self._pixels[rows], self._ids[rows])

    def _collect(self) -> None:
        while self.count < len(self._pixels):
            self._add(next(self._batches))

    def _add(self, batch: Drawings) -> None:
        room = len(self._pixels) - self.count
        rows = slice(self.count, self.count + min(room, len(batch.ids)))
        self._pixels[rows] = batch.pixels[:room].to(self._pixels.device)
        self._ids[rows] = batch.ids[:room].to(self._ids.device)
        self.count = rows.stop
