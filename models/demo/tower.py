"""Trains the vision tower to label the figure in each patch.

Learning from answers alone is very slow for an untrained tower; with labels it learns to tell shapes apart in a few
minutes, before the language model uses its output.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from models.demo.exercises.scenes import COLORS, SHAPES, Scene, random_scene
from models.demo.packing import PATCHES, normalized, pixels_of

NOTHING = 0
_LABELS = {f"{color} {shape}": 1 + index for index, (color, shape) in enumerate((c, s) for c in COLORS for s in SHAPES)}


@dataclass(frozen=True, slots=True)
class LabelledPictures:
    """`pixels` is `[pictures, 3, SIDE, SIDE]`, bytes; `labels` is `[pictures, PATCHES]`."""

    pixels: torch.Tensor
    labels: torch.Tensor


def labels_of(scene: Scene) -> list[int]:
    """Returns for each patch the figure whose centre is in it, or NOTHING."""
    labels = [NOTHING] * PATCHES
    for figure in scene.figures:
        labels[figure.cell] = _LABELS[figure.name]
    return labels


class LabelledScenes(IterableDataset[LabelledPictures]):
    """Yields random scenes without end."""

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
    """A tower with a linear classifier on each patch; the classifier is discarded after its training."""

    def __init__(self, tower: nn.Module, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.classifier = nn.Linear(width, 1 + len(_LABELS))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns logits `[pictures, PATCHES, labels]`, without the tower's first token, which is of the
        whole picture.
        """
        logits: torch.Tensor = self.classifier(self.tower(normalized(pixels)).last_hidden_state[:, 1:])
        return logits
