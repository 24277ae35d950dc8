"""One question with its answer: the value that every task generates."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from zlib import crc32

from models.demo.exercises.scenes import Scene

IMAGE = "<image>"
"""The mark of a picture in a prompt. The processor expands it to one mark for each patch."""

HELD_OUT_SHARE = 20
"""One in this many exercises is excluded from training, for tasks with more than a few hundred exercises."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """A prompt as a user would type it, with one IMAGE for each scene, and its only correct answer."""

    prompt: str
    answer: str
    scenes: tuple[Scene, ...] = ()

    @property
    def held_out(self) -> bool:
        """True if the exercise belongs to the evaluation, by a hash of its question and pictures."""
        return crc32(f"{self.prompt}{self.scenes}".encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of exercise, and its weight in the training mix. `finite` tasks train on all their exercises."""

    name: str
    draw: Callable[[Random], Exercise]
    weight: float
    finite: bool = False

    def for_training(self, random: Random) -> Exercise:
        """Returns an exercise that is not held out."""
        return self._drawn(random, held_out=False)

    def for_evaluation(self, random: Random) -> Exercise:
        """Returns an exercise that training does not see, unless the task is finite."""
        return self._drawn(random, held_out=True)

    def _drawn(self, random: Random, *, held_out: bool) -> Exercise:
        exercise = self.draw(random)
        while not self.finite and exercise.held_out != held_out:
            exercise = self.draw(random)
        return exercise
