"""The progress of a training: its end, its learning rate, and when to report and to save."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

_WARM_UP = 0.03


@dataclass(slots=True)
class Progress:
    """The share that is done: of the steps, or of the seconds if those run out first."""

    steps: int
    seconds: float
    done_steps: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def shares(self) -> Iterator[float]:
        """Yields the share that is done, from 0 to 1, before each step; ends when everything is done."""
        while (share := max(self.done_steps / self.steps, self.elapsed_seconds / self.seconds)) < 1:
            yield share
            self.done_steps += 1


class Every:
    """Tells when the next of `parts` equal parts of a training is done."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._done = 0

    def is_due(self, share: float) -> bool:
        """True if `share` has entered a new part."""
        part = int(share * self._parts)
        due, self._done = part > self._done, part
        return due


def learning_rate_factor(share: float) -> float:
    """Returns the learning rate's factor: a linear warm-up, then half a cosine down to 0."""
    return min(share / _WARM_UP, 0.5 + 0.5 * math.cos(math.pi * share))
