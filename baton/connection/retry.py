"""Retries of failed calls, the pauses before them, and the resumption of lost answers."""

import random
from dataclasses import dataclass

from baton.errors import BatonError, EngineFailed, HandoffLost, Overloaded, QuotaExceeded, StaleEpoch, Unavailable

# The errors that docs/errors.md marks *again*, with their subclasses.
TRANSIENT = (EngineFailed, HandoffLost, Overloaded, QuotaExceeded, StaleEpoch, Unavailable)


@dataclass(frozen=True, slots=True)
class Retry:
    """The number and the pauses of a client's retries after a transient error, such as Overloaded or Unavailable.

    `attempts` counts the first one too. The pause is what the server asks for, else `initial_seconds`, doubled for each
    further attempt up to `max_seconds`; up to a quarter is added at random, so that clients do not return all at once.
    A streamed answer is requested again only while nothing of it has arrived. The call's timeout bounds all attempts
    together: if the pause does not fit, the error is raised at once.
    """

    attempts: int = 4
    initial_seconds: float = 0.1
    max_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.initial_seconds < 0 or self.max_seconds < 0:
            raise ValueError("Retry: attempts must be at least 1, and pauses must not be negative")

    def pause_after(self, error: BatonError, attempt: int, seconds_left: float | None = None) -> float | None:
        """Seconds to wait after the failure of that attempt, counted from 1; None if the error has to be raised."""
        if attempt >= self.attempts or not isinstance(error, TRANSIENT):
            return None
        backoff: float = min(self.initial_seconds * 2 ** (attempt - 1), self.max_seconds)
        asked: float = getattr(error, "retry_after_seconds", 0.0)
        pause = (asked or backoff) * random.uniform(1.0, 1.25)
        return pause if seconds_left is None or pause < seconds_left else None


NO_RETRY = Retry(attempts=1)


@dataclass(frozen=True, slots=True)
class Resume:
    """Answers that survive the loss of a connection, or of a router: they go on, and the client asks for the rest.

    `keep_seconds` is how long an answer goes on without its client, and how long the client tries; the router's limit
    may be lower. A router that says nothing is asked a question; if it does not answer, and another router sees more of
    the answer than has come, it is left. One that answers nothing for `stall_seconds` is left in any case.
    A client that ends without closing its answers leaves them to run for `keep_seconds`.
    """

    keep_seconds: float = 10.0
    stall_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.keep_seconds <= 0 or self.stall_seconds <= 0:
            raise ValueError("Resume needs times above 0")

    @property
    def silent_seconds(self) -> float:
        """After so long without a message a router is asked whether it is there."""
        return self.stall_seconds / 2

    @property
    def question_seconds(self) -> float:
        """The time that it has to answer."""
        return self.stall_seconds / 2
