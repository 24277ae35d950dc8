"""Whether a thread that computes is at work, or stuck in what it does."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Prompts of large models take long on a CPU; a GPU that needs a minute for a step is not coming back.
_STALL_SECONDS = {"cpu": 600.0, "cuda": 60.0}


class Pulse:
    """Written by the thread, read by others. `seconds` is what one piece of its work may take; None: by the device."""

    def __init__(self, device: str, seconds: float | None) -> None:
        self._seconds = _STALL_SECONDS[device] if seconds is None else seconds
        self._began: float | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether its present piece of work takes too long. A thread that waits for work is not stuck."""
        began = self._began
        return began is not None and time.monotonic() - began > self._seconds

    @contextmanager
    def beating(self) -> Iterator[None]:
        """One piece of work."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None
