"""The training data: pictures of random scenes, and the words for them."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
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


def held_out_prompts(count: int, seed: int) -> list[str]:
    """Prompts that training never sees, none twice; two, three and four figures are equally likely."""
    random, found = Random(seed), dict[str, None]()
    while len(found) < count:
        scene = random_scene(random)
        if is_held_out(scene):
            found.setdefault(prompt_of(scene))
    return list(found)


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
