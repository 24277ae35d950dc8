"""The vision tower's first lessons: what, if anything, stands in each patch.

Answers alone teach a tower from scratch very slowly; labels teach it to tell shapes apart in a few minutes, before the
language model has to use what it sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from models.demo.packing import PATCHES, normalized, pixels_of
from models.demo.scenes import COLORS, SHAPES, Scene, random_scene

NOTHING = 0
_LABELS = {f"{color} {shape}": 1 + index for index, (color, shape) in enumerate((c, s) for c in COLORS for s in SHAPES)}


@dataclass(frozen=True, slots=True)
class LabelledPictures:
    """`pixels` is `[pictures, 3, SIDE, SIDE]`, bytes; `labels` is `[pictures, PATCHES]`."""

    pixels: torch.Tensor
    labels: torch.Tensor


def labels_of(scene: Scene) -> list[int]:
    """For each patch, the figure whose centre is in it, or NOTHING."""
    labels = [NOTHING] * PATCHES
    for figure in scene.figures:
        labels[figure.cell] = _LABELS[figure.name]
    return labels


class LabelledScenes(IterableDataset[LabelledPictures]):
    """Random scenes without end."""

    def __init__(self, seed: int, pictures: int) -> None:
        self._seed = seed
        self._pictures = pictures

    def __iter__(self) -> Iterator[LabelledPictures]:
        worker = get_worker_info()
        random = Random(f"{self._seed}/tower/{worker.id if worker else 0}")
        while True:
            scenes = [random_scene(random) for _ in range(self._pictures)]
            yield LabelledPictures(pixels_of(scenes), torch.tensor([labels_of(scene) for scene in scenes]))


class PatchLabels(nn.Module):
    """A tower with a linear classifier on each patch; the classifier is thrown away after its training."""

    def __init__(self, tower: nn.Module, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.classifier = nn.Linear(width, 1 + len(_LABELS))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits, `[pictures, PATCHES, labels]`. The tower's first token is of the whole picture and is left out."""
        logits: torch.Tensor = self.classifier(self.tower(normalized(pixels)).last_hidden_state[:, 1:])
        return logits
