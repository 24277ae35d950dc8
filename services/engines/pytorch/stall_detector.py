"""Detects a computing thread that hangs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Of one layer, not of a step: steps of large models take long on a CPU.
_STALL_SECONDS = 12.0


class StallDetector:
    """The working thread calls it, other threads read it. `seconds` is the longest time without a beat during work.

    Each layer of `module` beats, so that a long step counts as progress.
    """

    def __init__(self, module: torch.nn.Module, seconds: float | None) -> None:
        self._seconds = _STALL_SECONDS if seconds is None else seconds
        self._began: float | None = None
        self._beat_at = time.monotonic()
        for part in module.modules():
            if isinstance(part, torch.nn.ModuleList):
                for layer in part:
                    layer.register_forward_pre_hook(self._beat)

    @property
    def quiet_seconds(self) -> float:
        """The time since the last beat, or since the end of the last work."""
        return time.monotonic() - self._beat_at

    @property
    def is_stuck(self) -> bool:
        """True if the current work makes no progress. A thread without work does not hang."""
        began = self._began
        return began is not None and time.monotonic() - max(began, self._beat_at) > self._seconds

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Marks a piece of work."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._beat_at = time.monotonic()
            self._began = None

    def _beat(self, *_: object) -> None:
        self._beat_at = time.monotonic()
