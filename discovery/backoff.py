"""How long to wait before the next attempt: longer each time, and never in step with others."""

import random


class Backoff:
    """Doubling waits with jitter, from `first_seconds` to `most_seconds`; each is half to all of its bound."""

    def __init__(self, first_seconds: float = 0.1, most_seconds: float = 3.0) -> None:
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._bound = first_seconds
        self._waiting = False

    @property
    def waiting(self) -> bool:
        """Whether an attempt has failed since the last success."""
        return self._waiting

    def next_seconds(self) -> float:
        """How long to wait now."""
        self._waiting = True
        bound = self._bound
        self._bound = min(2 * bound, self._most_seconds)
        return bound * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begins anew: the last attempt succeeded."""
        self._bound = self._first_seconds
        self._waiting = False
