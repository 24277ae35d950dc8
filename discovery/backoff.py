"""Exponential backoff with jitter."""

import random


class Backoff:
    """Waits whose bound doubles, from `first_seconds` to `max_seconds`; each is 50 to 100 % of its bound, at random."""

    def __init__(self, first_seconds: float = 0.1, max_seconds: float = 3.0) -> None:
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._bound = first_seconds
        self._is_retrying = False

    @property
    def is_retrying(self) -> bool:
        """True if an attempt has failed since the last success."""
        return self._is_retrying

    def next_seconds(self) -> float:
        """The seconds to wait before the next attempt."""
        self._is_retrying = True
        bound = self._bound
        self._bound = min(2 * bound, self._max_seconds)
        return bound * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Starts over: the last attempt succeeded."""
        self._bound = self._first_seconds
        self._is_retrying = False
